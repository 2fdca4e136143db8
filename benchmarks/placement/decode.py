"""A simulated decode worker: a host pool that keeps what it had, one link, a batch.

Only what the pool lacks is moved (delta handoff), while prefill computes; answers' own blocks are
not kept, since the trace does not say which ids they would have.
"""

from collections import deque
from collections.abc import Callable

from benchmarks.placement import timing
from benchmarks.placement.beats import Beats, fixed_part
from benchmarks.placement.cache import Changed, Lease, PrefixCache
from benchmarks.placement.events import Timeline
from benchmarks.placement.workload import Request
from services.router.fleet import Heard
from shared import farspan_pb2 as pb

_HOST_TOKENS = 994_500  # 48 GiB with the MTP layer
_MAX_RUNNING = 32


class DecodeWorker:
    """Requests from their placement to their end."""

    def __init__(
        self,
        worker_id: str,
        timeline: Timeline,
        cache: tuple[int, Changed],  # tokens a block, who is told of changes
        phase_s: float,
        hooks: tuple[Callable[[Request], None], Callable[[Request], None]],  # imported, ended
    ) -> None:
        self._node_tokens, changed = cache
        self._timeline = timeline
        self._imported, self._ended = hooks
        self.cache = PrefixCache(_HOST_TOKENS // self._node_tokens, changed)
        self._waiting: deque[Request] = deque()
        self._leases: dict[str, Lease] = {}
        self._imported_at_s: dict[str, float] = {}
        self._prefilled: set[str] = set()
        self._unimported: dict[str, int] = {}
        self._num_running = 0
        self._link_free_s = 0.0
        self.imported_tokens = 0
        fixed = fixed_part(worker_id, pb.ROLE_DECODE, self._node_tokens, _MAX_RUNNING)
        self._beats = Beats(phase_s, fixed, self._load)

    def heard(self) -> Heard:
        """The last heartbeat."""
        return self._beats.until(self._timeline.now_s)

    def offer(self, request: Request) -> None:
        """Prefill has begun: reserve room and pull what is missing."""
        self.heard()
        self._unimported[request.request_id] = request.turn.num_tokens
        self._waiting.append(request)
        self._admit()

    def prefilled(self, request: Request) -> None:
        """The prompt is computed; its last chunk can be pulled."""
        self.heard()
        self._prefilled.add(request.request_id)
        self._continue(request)

    def _admit(self) -> None:
        while self._waiting and len(self._leases) < _MAX_RUNNING:
            request = self._waiting[0]
            num_tokens = request.turn.num_tokens + request.turn.num_new_tokens
            lease = self.cache.allocate(request, num_tokens)
            if lease is None:
                return
            self._waiting.popleft()
            missing = request.turn.num_tokens - lease.num_hit_nodes * self._node_tokens
            self.imported_tokens += missing
            self._unimported[request.request_id] = missing
            begin_s = max(self._timeline.now_s, self._link_free_s)
            self._link_free_s = begin_s + timing.import_s(missing)
            self._leases[request.request_id] = lease
            self._imported_at_s[request.request_id] = self._link_free_s
            self._continue(request)

    def _continue(self, request: Request) -> None:
        """Once it is admitted and computed, wait for the link."""
        name = request.request_id
        if name in self._leases and name in self._prefilled:
            self._prefilled.discard(name)
            ready_s = max(self._timeline.now_s, self._imported_at_s.pop(name))
            self._timeline.at(ready_s, lambda: self._start(request))

    def _start(self, request: Request) -> None:
        self.heard()
        self._unimported.pop(request.request_id)
        self.cache.publish(self._leases[request.request_id], request.turn.num_tokens)
        self._num_running += 1
        seconds = timing.decode_s(request.turn.num_new_tokens, self._num_running)
        self._timeline.at(self._timeline.now_s + seconds, lambda: self._end(request))
        self._imported(request)

    def _end(self, request: Request) -> None:
        self.heard()
        self._num_running -= 1
        self.cache.free(self._leases.pop(request.request_id))
        self._admit()
        self._ended(request)

    def _load(self) -> pb.Load:
        return pb.Load(
            num_running=self._num_running,
            num_waiting=len(self._waiting),
            waiting_tokens=sum(self._unimported.values()),
            free_blocks=self.cache.num_free,
            total_blocks=self.cache.num_blocks,
            free_device_pages=1,
            total_device_pages=1,
            free_index_pages=self.cache.num_free,
            total_index_pages=self.cache.num_blocks,
        )
