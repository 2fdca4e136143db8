"""Speed of looking rows up and of fetching missing ones from pinned host memory.

The pool is 40 GiB, layer-major; consecutive calls fetch other rows of other layers, as a decode
step does. A request's rows lie side by side and its misses in ascending order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from benchmarks.kernel_speed.rates import Rates, Row, graph_time_ms, time_ms
from shared.engine.kernels.forget_rows import forget_rows
from shared.engine.kernels.host_gather import host_gather
from shared.engine.kernels.hot_tables import (
    BatchBlocks,
    HotTables,
    MissPlan,
    Resolution,
    make_scratch,
)
from shared.engine.kernels.resolve_rows import resolve_rows
from shared.engine.kv.pinned_pool import pinned_pool

_ROW_BYTES = 656
_NUM_REQUESTS = 64
_MISSES = 256
_INDEXED = 65_536  # positions the resolver's selections come from
_HOT_ROWS = 4096
_TOP_K = 2048
_NUM_PLANS = 78
_GATHER_BYTES = _NUM_REQUESTS * _MISSES * _ROW_BYTES
_RESERVED = 8  # multiprocessors kept free of the GEMM
_MULTIPROCESSORS = 132
_MATRIX = 8192
_NUM_GEMMS = 200


@dataclass(frozen=True)
class _Shape:
    """How the pool is shared out."""

    num_layers: int
    context: int  # rows of a request
    gather_figure: str = ""
    beside_figure: str = ""

    @property
    def num_bytes(self) -> int:
        return self.num_layers * _NUM_REQUESTS * self.context * _ROW_BYTES

    def __str__(self) -> str:
        return (
            f"{_NUM_REQUESTS} x {_MISSES} misses of {self.context:,} rows, {self.num_layers} layers"
        )


_SHAPES = (
    # 40 GiB hold 78 layers of 64 such requests: a layer is 0.5 GiB.
    _Shape(78, 13_056, "gather_gbps", "gather_beside_gemm_gbps"),
    # The same bytes as few layers of long requests: 2.6 GiB a layer, more than the card's address
    # translation covers from one layer to the next.
    _Shape(15, 65_536),
)


def measure(_rates: Rates) -> Iterator[Row]:
    """The resolver, the gather alone, and the gather beside a GEMM on the other multiprocessors."""
    yield from _resolve()
    yield from _forget()
    with pinned_pool(max(shape.num_bytes for shape in _SHAPES)) as pool:
        for shape in _SHAPES:
            yield _gather_row(shape, _fetches(pool, shape))
        for shape in _SHAPES:
            yield from _beside_gemm(shape, _fetches(pool, shape))


def _fetches(pool: torch.Tensor, shape: _Shape) -> Callable[[int], None]:
    """A call that runs the next plan on the next layer, with so many programs."""
    layers = pool[: shape.num_bytes].view(shape.num_layers, -1, _ROW_BYTES)
    device_rows = torch.zeros(
        _NUM_REQUESTS * _HOT_ROWS, _ROW_BYTES, dtype=torch.uint8, device="cuda"
    )
    calls = cycle(
        [(layers[n % len(layers)], _random_plan(shape.context)) for n in range(_NUM_PLANS)]
    )

    def fetch(num_programs: int) -> None:
        host_rows, plan = next(calls)
        host_gather(host_rows, device_rows, plan, num_programs)

    return fetch


def _random_plan(context: int) -> MissPlan:
    """Every request misses rows of its own region, in ascending order."""
    request = torch.arange(_NUM_REQUESTS, device="cuda")[:, None]
    chosen = _distinct(context).sort(1).values + request * context
    slots = _distinct(_HOT_ROWS) + request * _HOT_ROWS
    counts = torch.full((_NUM_REQUESTS,), _MISSES, dtype=torch.int32, device="cuda")
    return MissPlan(chosen.int(), slots.int(), counts)


def _distinct(limit: int) -> torch.Tensor:
    return torch.rand(_NUM_REQUESTS, limit, device="cuda").argsort(1)[:, :_MISSES]


def _gather_row(shape: _Shape, fetch: Callable[[int], None]) -> Row:
    milliseconds = time_ms(lambda: fetch(2 * _RESERVED), _NUM_PLANS)
    speed = _GATHER_BYTES / milliseconds / 1e6
    return Row(
        figure=shape.gather_figure,
        kernel="host_gather",
        shape=str(shape),
        time_ms=milliseconds,
        rate=f"{speed:.1f} GB/s",
        ratio=speed,
        bar=37.0,
    )


def _beside_gemm(shape: _Shape, fetch: Callable[[int], None]) -> Iterator[Row]:
    """cuBLASLt is told to leave the reserved multiprocessors out.

    The gather has one program for each of them, so it never takes more, whoever comes first.
    """
    left, right = (
        torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(left)

    def gemm() -> None:
        torch.mm(left, right, out=out)

    before_ms = time_ms(gemm, _NUM_GEMMS)
    beside_ms, speed = _run_together(gemm, lambda: fetch(_RESERVED))
    alone_ms = (before_ms + time_ms(gemm, _NUM_GEMMS)) / 2
    loss = 1 - alone_ms / beside_ms
    yield Row(
        figure=shape.beside_figure,
        kernel=f"host_gather beside a GEMM, {_RESERVED} SMs",
        shape=str(shape),
        time_ms=_GATHER_BYTES / speed / 1e6,
        rate=f"{speed:.1f} GB/s",
        ratio=speed,
        bar=25.0,
    )
    yield Row(
        figure=shape.beside_figure and "gather_beside_gemm_loss",
        kernel="what that GEMM loses",
        shape=f"bf16 {_MATRIX}^3, against all {_MULTIPROCESSORS} SMs alone",
        time_ms=beside_ms,
        rate=f"{2 * _MATRIX**3 / beside_ms / 1e9:.0f} TFLOP/s",
        ratio=loss,
        bar=_RESERVED / _MULTIPROCESSORS + 0.03,
        is_better_below=True,
    )


def _run_together(gemm: Callable[[], None], fetch: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of a GEMM and GB/s of the gather, while both streams are busy."""
    gemms, gathers = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    gemm_ends, gather_ends = [], []
    start = torch.cuda.Event(enable_timing=True)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(_RESERVED)
    start.record()
    for stream in (gemms, gathers):
        stream.wait_event(start)
    for _ in range(_NUM_GEMMS):
        with torch.cuda.stream(gemms):
            gemm()
            gemm_ends.append(gemms.record_event(torch.cuda.Event(enable_timing=True)))
        with torch.cuda.stream(gathers):
            for _ in range(6):  # about as long as the GEMM
                fetch()
                gather_ends.append(gathers.record_event(torch.cuda.Event(enable_timing=True)))
    torch.cuda.synchronize()
    torch._C._set_sm_carveout_experimental(None)
    torch.backends.cuda.preferred_blas_library("default")
    gemm_times, gather_times = (
        [start.elapsed_time(end) for end in ends] for ends in (gemm_ends, gather_ends)
    )
    both_until = min(gemm_times[-1], gather_times[-1])
    gemm_ms = _mean_interval(gemm_times, both_until)
    return gemm_ms, _GATHER_BYTES / _mean_interval(gather_times, both_until) / 1e6


def _mean_interval(ends: list[float], both_until: float) -> float:
    """Between ends in the time that both ran, the first tenth left out as warm-up."""
    kept = [end for end in ends if both_until / 10 <= end <= both_until]
    return (kept[-1] - kept[0]) / (len(kept) - 1)


def _resolve() -> Iterator[Row]:
    """Selections drift from step to step, so that some rows miss."""
    for num_requests, num_queries, hot_rows in ((64, 1, 4096), (64, 4, 10_240), (8, 1, 4096)):
        device = torch.device("cuda")
        tables = HotTables.allocate(1, num_requests, hot_rows // 64, device)
        out = Resolution.allocate(num_requests, num_queries, _TOP_K, device)
        num_blocks = num_requests * _INDEXED // 64
        blocks = BatchBlocks(
            torch.arange(num_blocks, dtype=torch.int32, device=device).view(num_requests, -1),
            torch.arange(num_requests, dtype=torch.int32, device=device),
            torch.full((num_blocks,), -1, dtype=torch.int64, device=device),
        )
        scratch = make_scratch(num_requests, num_blocks, device)
        steps = _drifting(num_requests, num_queries)

        def resolve(
            steps: list[torch.Tensor] = steps,
            blocks: BatchBlocks = blocks,
            tables: HotTables = tables,
            scratch: torch.Tensor = scratch,
            out: Resolution = out,
        ) -> None:
            for positions in steps:
                resolve_rows(positions, blocks, tables, 0, scratch, out)

        milliseconds = graph_time_ms(resolve, 20) / len(steps)
        misses = out.plan.num_misses.float().mean().item()
        yield Row(
            figure="",
            kernel="resolve_rows",
            shape=f"{num_requests} requests, {num_queries} x {_TOP_K} of {hot_rows} hot rows",
            time_ms=milliseconds,
            rate=f"{misses:.0f} misses a request",
            ratio=milliseconds * 1e3,
            bar=float("inf"),
            is_better_below=True,
        )


def _forget() -> Iterator[Row]:
    """One decode step's newest rows, in all groups."""
    num_groups, rewritten = 22, 4
    tables = HotTables.allocate(
        num_groups, _NUM_REQUESTS, _HOT_ROWS // 64, device=torch.device("cuda")
    )
    leases = torch.arange(_NUM_REQUESTS, dtype=torch.int32, device="cuda")
    host_rows = torch.zeros(_NUM_REQUESTS, rewritten, dtype=torch.int32, device="cuda")
    milliseconds = graph_time_ms(lambda: forget_rows(host_rows, leases, tables))
    yield Row(
        figure="",
        kernel="forget_rows",
        shape=f"{_NUM_REQUESTS} requests x {rewritten} rows, {num_groups} groups",
        time_ms=milliseconds,
        rate=f"{tables.keys.nbytes / milliseconds / 1e9:.2f} TB/s",
        ratio=milliseconds * 1e3,
        bar=float("inf"),
        is_better_below=True,
    )


def _drifting(num_requests: int, num_queries: int) -> list[torch.Tensor]:
    score = torch.randn(num_requests, 1, _INDEXED, device="cuda")
    steps = []
    for _ in range(8):
        score = score + 0.5 * torch.randn_like(score)
        noise = 0.05 * torch.randn(num_requests, num_queries, _INDEXED, device="cuda")
        steps.append((score + noise).topk(_TOP_K, -1).indices.sort(-1).values.int().contiguous())
    return steps
