"""The cells of the table: one workload on one fleet under every placer, in figures.

A cell's name says what it is: `sessions_8x16_1024k` are agent sessions on 8 prefill workers with 16
lanes and 1,024K tokens of cache each, `requests_8_1024k` the open-loop requests on 8.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.placement import placers
from benchmarks.placement.placers import Placer
from benchmarks.placement.replay import Replay, Run, Seen, Setup, oracle_hits
from benchmarks.placement.traces import Session, Turn
from benchmarks.placement.workload import Clocked, Lanes, Workload
from shared.block_hash import BLOCK_TOKENS

_SEED = 1
# Of each cell at least. With fewer, luck decides which policy is better: at 8 workers with 8 lanes
# the P90 of 1,256 requests lies between 0.33 and 0.54 s, as the seed falls.
_NUM_REQUESTS = 5000
FLEETS = (4, 8, 16)
# Of each prefill worker: lanes, and tokens of cache. A lane's share is 128K, 64K and 51K tokens:
# from enough to too little. With less everybody collapses: prompts in flight alone fill the caches.
LOADS = ((8, 2**20), (16, 2**20), (10, 2**19))
_REQUEST_CACHE_TOKENS = 2**20
PLACERS: Mapping[str, Callable[[], Placer]] = {
    "farspan": placers.Farspan,
    "round_robin": placers.round_robin,
    "least_loaded": placers.least_loaded,
    "sticky": placers.sticky,
    "weighted": lambda: placers.weighted(_SEED),
}


@dataclass(frozen=True)
class Cell:
    """A workload on a fleet."""

    name: str
    setup: Setup
    workloads: Sequence[Callable[[], Workload]]  # one for each seed; all count alike


@dataclass(frozen=True)
class Outcome:
    """What one placer made of a cell."""

    reuse: float  # tokens hit / prompt tokens
    oracle_reuse: float  # in one cache of the summed size, for the same order of arrivals
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    busiest: float  # work of the busiest prefill worker / mean work
    moved_tokens: float  # KV tokens that a request moved from prefill to decode, on average

    @property
    def vs_oracle(self) -> float:
        """The share of the possible reuse."""
        return self.reuse / self.oracle_reuse


def all_cells(sessions: Sequence[Session], requests: Sequence[Turn]) -> list[Cell]:
    """The whole table."""
    cells = [
        session_cell(sessions, num_workers, lanes, cache_tokens)
        for num_workers in FLEETS
        for lanes, cache_tokens in LOADS
    ]
    return cells + [request_cell(requests, num_workers) for num_workers in FLEETS]


def session_cell(
    sessions: Sequence[Session], num_workers: int, lanes_per_worker: int, cache_tokens: int
) -> Cell:
    """Lanes of agent sessions; lanes fill the caches before requests count."""
    num_lanes = num_workers * lanes_per_worker
    setup = Setup(
        num_workers=num_workers,
        cache_tokens=cache_tokens,
        node_tokens=BLOCK_TOKENS,
        num_requests=1000 + 4 * num_lanes,
        num_warm_up=4 * num_lanes,
    )
    name = f"sessions_{num_workers}x{lanes_per_worker}_{cache_tokens // 1024}k"

    def lanes(seed: int) -> Callable[[], Workload]:
        return lambda: Lanes(sessions, num_lanes, seed)

    num_seeds = -(-_NUM_REQUESTS // setup.num_requests)
    return Cell(name, setup, [lanes(seed) for seed in range(1, num_seeds + 1)])


def request_cell(requests: Sequence[Turn], num_workers: int) -> Cell:
    """The first half hour of single requests."""
    setup = Setup(num_workers, _REQUEST_CACHE_TOKENS, Clocked.node_tokens, _NUM_REQUESTS, 1000)
    name = f"requests_{num_workers}_{_REQUEST_CACHE_TOKENS // 1024}k"
    return Cell(name, setup, [lambda: Clocked(requests)])


def outcome(cell: Cell, make: Callable[[], Placer]) -> Outcome:
    """Replay it."""
    runs = [Replay(cell.setup, workload(), make()).to_end() for workload in cell.workloads]
    counted = [seen for run in runs for seen in run.counted]
    prompt_tokens = sum(seen.request.turn.num_tokens for seen in counted)
    return Outcome(
        reuse=sum(seen.hit_tokens for seen in counted) / prompt_tokens,
        oracle_reuse=sum(_possible_tokens(run, cell.setup) for run in runs) / prompt_tokens,
        ttft_p50_s=percentile(counted, 0.5),
        ttft_p90_s=percentile(counted, 0.9),
        ttft_p99_s=percentile(counted, 0.99),
        busiest=sum(_busiest(run) for run in runs) / len(runs),
        moved_tokens=sum(run.imported_tokens for run in runs) / sum(len(run.seen) for run in runs),
    )


def _possible_tokens(run: Run, setup: Setup) -> int:
    possible = oracle_hits(run, setup)
    return sum(possible[seen.request.request_id] for seen in run.counted)


def percentile(counted: Sequence[Seen], share: float) -> float:
    """Of the times to the first token, the nearest rank."""
    times = sorted(seen.ttft_s for seen in counted if seen.ttft_s is not None)
    return times[min(len(times) - 1, int(share * len(times)))]


def _busiest(run: Run) -> float:
    return max(run.busy_s) * len(run.busy_s) / sum(run.busy_s)
