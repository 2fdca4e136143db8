"""A simulated prefill worker: the real chunk scheduler and throughput meter, a cache, a clock."""

from collections.abc import Callable

from benchmarks.placement import timing
from benchmarks.placement.beats import Beats, fixed_part
from benchmarks.placement.cache import Changed, Lease, PrefixCache
from benchmarks.placement.events import Timeline
from benchmarks.placement.workload import Request
from services.prefill.scheduler import PlannedChunk, PrefillScheduler
from services.prefill.throughput import Throughput
from services.router.fleet import Heard
from shared import farspan_pb2 as pb

Started = Callable[[Request, Lease], None]
Complete = Callable[[Request], None]


class PrefillWorker:
    """Computes prompts in chunks, several at once; keeps their blocks until they are released."""

    def __init__(
        self,
        worker_id: str,
        timeline: Timeline,
        cache: tuple[int, int, Changed],  # blocks, tokens a block, who is told of changes
        phase_s: float,
        hooks: tuple[Started, Complete],
    ) -> None:
        num_blocks, self._node_tokens, changed = cache
        self._timeline = timeline
        self._started, self._complete = hooks
        self.cache = PrefixCache(num_blocks, changed, timeline.clock)
        self._scheduler = PrefillScheduler(
            num_blocks=num_blocks,
            block_tokens=self._node_tokens,
            chunk_tokens=timing.CHUNK_TOKENS,
        )
        self._throughput = Throughput()
        self._requests: dict[str, Request] = {}
        self._leases: dict[str, Lease] = {}
        self._is_busy = False
        self.busy_s = 0.0
        fixed = fixed_part(worker_id, pb.ROLE_PREFILL, self._node_tokens, 256)
        self._beats = Beats(phase_s, fixed, self._load)

    def heard(self) -> Heard:
        """The last heartbeat."""
        return self._beats.until(self._timeline.now_s)

    def submit(self, request: Request) -> None:
        """A prompt arrives."""
        self.heard()
        self._requests[request.request_id] = request
        self._scheduler.enqueue(request.request_id, request.turn.num_tokens)
        self._begin_step()

    def release(self, request: Request) -> None:
        """The prompt's KV is elsewhere now."""
        self.heard()
        self._scheduler.release(request.request_id)
        del self._requests[request.request_id]
        self.cache.free(self._leases.pop(request.request_id))
        self._begin_step()

    def _begin_step(self) -> None:
        if self._is_busy:
            return
        self._scheduler.admit(self._allocate)
        chunks = self._scheduler.next_step()
        if not chunks:
            return
        num_new = sum(chunk.end - chunk.first for chunk in chunks)
        context = sum((chunk.end - chunk.first) * chunk.first for chunk in chunks) / num_new
        seconds = timing.prefill_step_s(num_new, context)
        self._is_busy = True
        self._timeline.at(
            self._timeline.now_s + seconds, lambda: self._end_step(chunks, num_new, seconds)
        )

    def _end_step(self, chunks: list[PlannedChunk], num_new: int, seconds: float) -> None:
        self.heard()
        self._is_busy = False
        self.busy_s += seconds
        self._throughput.add(num_new, seconds)
        for chunk in chunks:
            self.cache.publish(self._leases[chunk.request_id], chunk.end)
        for request_id in self._scheduler.computed(chunks):
            self._complete(self._requests[request_id])
        self._begin_step()

    def _allocate(self, request_id: str) -> int | None:
        request = self._requests[request_id]
        lease = self.cache.allocate(request, request.turn.num_tokens)
        if lease is None:
            return None
        self._leases[request_id] = lease
        self._started(request, lease)
        return lease.num_hit_nodes * self._node_tokens

    def _load(self) -> pb.Load:
        return pb.Load(
            num_running=self._scheduler.num_active,
            num_waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.active_tokens + self._scheduler.waiting_tokens,
            free_blocks=self.cache.num_free,
            total_blocks=self.cache.num_blocks,
            tokens_per_s=self._throughput.tokens_per_s,
            eviction_age_s=self.cache.eviction_age_s,
            empty_blocks=self.cache.num_empty,
            step_s=self._throughput.step_s,
        )
