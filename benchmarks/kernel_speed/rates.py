"""What the card itself does in this run, and how a kernel's time is taken.

Cards differ by several per cent and clocks fall under load, so figures are compared within a run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

_COPY_BYTES = 8 * 2**30
_MATRIX = 8192
_SUSTAINED_CALLS = 200


@dataclass(frozen=True)
class Rates:
    """Sustained ceilings of one card. Copy bytes count what is read and what is written."""

    copy_bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float


class Row(NamedTuple):
    """One line of the table: a kernel at a shape, and its bar."""

    figure: str  # its name in kernels.json; empty for a line that is only shown
    kernel: str
    shape: str
    time_ms: float
    rate: str  # in words, with its unit
    ratio: float  # what the bar is about: a ratio, or GB/s
    bar: float
    is_better_below: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the bar is reached."""
        return self.ratio <= self.bar if self.is_better_below else self.ratio >= self.bar


def time_ms(run: Callable[[], object], num_calls: int = _SUSTAINED_CALLS) -> float:
    """The mean time of one of `num_calls` calls back to back, after a tenth as many to warm up."""
    for _ in range(max(3, num_calls // 10)):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(num_calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / num_calls


def graph_time_ms(run: Callable[[], object], num_calls: int = _SUSTAINED_CALLS) -> float:
    """The same for calls too short to be launched one by one: replays of one captured graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return time_ms(graph.replay, num_calls)


def measure() -> Rates:
    """The ceilings of the current card, after some seconds of load."""
    copy_ms = _copy_ms()
    left, right = (
        torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    bf16_ms = time_ms(lambda: left @ right)
    one = torch.ones((), device="cuda")
    left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    fp8_ms = time_ms(
        lambda: torch._scaled_mm(
            left8, right8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    )
    flop = 2 * _MATRIX**3
    return Rates(
        copy_bytes_per_s=2 * _COPY_BYTES / copy_ms * 1e3,
        bf16_flop_per_s=flop / bf16_ms * 1e3,
        fp8_flop_per_s=flop / fp8_ms * 1e3,
    )


def _copy_ms() -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return time_ms(lambda: target.copy_(source), 20)
