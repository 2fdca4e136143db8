"""One replay: a workload against simulated workers, each placement made as the router makes it.

Deterministic: the same arguments give the same run, request for request.
"""

from dataclasses import dataclass, field

from benchmarks.placement.cache import Lease, PrefixCache
from benchmarks.placement.decode import DecodeWorker
from benchmarks.placement.events import Timeline
from benchmarks.placement.index import LateIndex
from benchmarks.placement.placers import Placer
from benchmarks.placement.prefill import PrefillWorker
from benchmarks.placement.workload import Request, Workload
from services.router.promises import Promises
from shared import farspan_pb2 as pb

_LIFETIME_S = 3600.0


@dataclass(frozen=True)
class Setup:
    """The fleet, and which requests count."""

    num_workers: int  # prefill workers; there are twice as many decode workers
    cache_tokens: int  # of each prefill worker
    node_tokens: int
    num_requests: int  # the run ends when so many that count have their first token
    num_warm_up: int  # requests that arrive before any counts


@dataclass
class Seen:
    """What became of one request."""

    request: Request
    arrived_s: float
    counts: bool  # it came after the warm-up
    prefill: str = ""
    hit_tokens: int = 0
    ttft_s: float | None = None
    reason: str = ""


@dataclass
class Run:
    """What a replay saw, in order of arrival."""

    seen: dict[str, Seen] = field(default_factory=dict)
    imported_tokens: int = 0
    busy_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def counted(self) -> list[Seen]:
        """Those after the warm-up that had their first token."""
        return [one for one in self.seen.values() if one.counts and one.ttft_s is not None]


class Replay:
    """The machinery of one run."""

    def __init__(self, setup: Setup, workload: Workload, placer: Placer) -> None:
        self._setup = setup
        self._workload = workload
        self._placer = placer
        self._timeline = Timeline()
        self._index = LateIndex(self._timeline.clock)
        self._promises = Promises(self._timeline.clock)
        self.run = Run()
        self._num_counted = 0
        self._chosen: dict[str, tuple[PrefillWorker, DecodeWorker]] = {}
        names = [f"{number:02}" for number in range(setup.num_workers)]
        self._prefills = {f"p{name}": self._prefill(f"p{name}") for name in names}
        halves = [f"d{name}{half}" for name in names for half in "ab"]
        self._decodes = {name: self._decode(name) for name in halves}

    def to_end(self) -> Run:
        """Run it."""
        for arrived_s, request in self._workload.first():
            self._expect(arrived_s, request)
        self._timeline.run(lambda: self._num_counted >= self._setup.num_requests)
        self.run.duration_s = self._timeline.now_s
        self.run.imported_tokens = sum(each.imported_tokens for each in self._decodes.values())
        self.run.busy_s = [each.busy_s for each in self._prefills.values()]
        return self.run

    def _prefill(self, worker_id: str) -> PrefillWorker:
        setup = self._setup
        num_blocks = setup.cache_tokens // setup.node_tokens
        cache = (num_blocks, setup.node_tokens, self._index.follower(worker_id))
        hooks = (self._on_started, self._on_computed)
        return PrefillWorker(worker_id, self._timeline, cache, _phase_s(worker_id), hooks)

    def _decode(self, worker_id: str) -> DecodeWorker:
        cache = (self._setup.node_tokens, self._index.follower(worker_id))
        hooks = (self._on_imported, self._on_ended)
        return DecodeWorker(worker_id, self._timeline, cache, _phase_s(worker_id), hooks)

    def _expect(self, arrived_s: float, request: Request) -> None:
        self._timeline.at(arrived_s, lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        message = pb.PlaceRequest(
            request_id=request.request_id,
            model="glm-5.3",
            block_hashes=request.block_hashes,
            num_prompt_tokens=request.turn.num_tokens,
            max_new_tokens=request.turn.num_new_tokens,
        )
        hits = self._promises.with_prefixes_on_the_way(
            self._index.hits(request), message.block_hashes
        )
        heard = [each.heard() for each in self._prefills.values()]
        heard += [each.heard() for each in self._decodes.values()]
        workers = self._promises.applied(heard)
        decision = self._placer.place(request, message, workers, hits)
        self._promises.make(message, decision, _LIFETIME_S)
        placement = decision.placement
        prefill = self._prefills[placement.prefill.worker_id]
        self._chosen[request.request_id] = (prefill, self._decodes[placement.decode.worker_id])
        self.run.seen[request.request_id] = Seen(
            request,
            self._timeline.now_s,
            counts=len(self.run.seen) >= self._setup.num_warm_up,
            prefill=placement.prefill.worker_id,
            reason=placement.reason,
        )
        prefill.submit(request)

    def _on_started(self, request: Request, lease: Lease) -> None:
        self.run.seen[request.request_id].hit_tokens = lease.num_hit_nodes * request.node_tokens
        self._chosen[request.request_id][1].offer(request)

    def _on_computed(self, request: Request) -> None:
        seen = self.run.seen[request.request_id]
        seen.ttft_s = self._timeline.now_s - seen.arrived_s
        self._num_counted += seen.counts
        self._chosen[request.request_id][1].prefilled(request)

    def _on_imported(self, request: Request) -> None:
        self._chosen[request.request_id][0].release(request)

    def _on_ended(self, request: Request) -> None:
        self._promises.end(request.request_id)
        del self._chosen[request.request_id]
        for arrived_s, following in self._workload.ended(request, self._timeline.now_s):
            self._expect(arrived_s, following)


def oracle_hits(run: Run, setup: Setup) -> dict[str, int]:
    """Hit tokens of each request in one cache with the summed capacity, in the same order.

    It computes in no time, so a prefix is there for whoever comes next: no fleet can have that.
    """
    cache = PrefixCache(setup.num_workers * setup.cache_tokens // setup.node_tokens)
    hits = {}
    for request_id, seen in run.seen.items():
        lease = cache.allocate(seen.request, seen.request.turn.num_tokens)
        assert lease is not None, "a prompt is larger than the whole fleet"
        hits[request_id] = lease.num_hit_nodes * seen.request.node_tokens
        cache.publish(lease, seen.request.turn.num_tokens)
        cache.free(lease)
    return hits


def _phase_s(worker_id: str) -> float:
    """Heartbeats are spread over the half second: workers start at different times."""
    return int(worker_id[1:3]) * 0.117 % 0.5
