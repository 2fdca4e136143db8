"""Shares work out over a process's compute threads; torch itself computes with one thread.

torch cuts an operation between its threads at any element. What is left over behind whole vectors
is computed in another way, and a product's sum may be split, so last bits would depend on the
number of threads and of rows (ADR-0011). Parts here are whole rows, tiles or experts, and what one
gives never depends on who computes it. Two parts at once are also faster than two threads in each.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

import torch

_FEWEST_ROWS = 16  # in a part: fewer take less time than handing them over

_Rows = TypeVar("_Rows")


class _Setting:
    num_threads = len(os.sched_getaffinity(0))


def use(num_threads: int) -> int:
    """Work on so many parts at once from now on, in all of the process; returns the old number."""
    before, _Setting.num_threads = _Setting.num_threads, num_threads
    return before


def torch_alone() -> None:
    """Let torch compute with one thread where it is called from this one; costs nothing."""
    torch.set_num_threads(1)


def spread(work: Callable[[Sequence[int]], None], tiles: Sequence[int]) -> None:
    """Call `work` with every tile in one of its parts, a thread each; raises what a part raised.

    Parts run at the same time and must write to different places; none may spread again.
    """
    torch_alone()
    num_parts = min(_Setting.num_threads, len(tiles))
    if num_parts < 2:
        work(tiles)
        return
    is_inference = torch.is_inference_mode_enabled()

    def run(part: Sequence[int]) -> None:
        with torch.inference_mode(is_inference):  # a mode of the thread
            work(part)

    # Causal tiles grow: every thread gets small and large ones.
    parts = [tiles[first::num_parts] for first in range(num_parts)]
    list(_threads(_Setting.num_threads).map(run, parts))


def by_rows(compute: Callable[..., _Rows], *rows: torch.Tensor) -> _Rows:
    """compute(*rows), on parts of the rows at once.

    It must compute each row by itself, and give a tensor of as many rows, or None, or a dataclass
    or tuple of these.
    """
    num_rows = len(rows[0])
    num_parts = max(1, min(_Setting.num_threads, num_rows // _FEWEST_ROWS))
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    found: dict[int, _Rows] = {}

    def work(parts: Sequence[int]) -> None:
        for part in parts:
            own = slice(bounds[part], bounds[part + 1])
            found[part] = compute(*(tensor[own] for tensor in rows))

    spread(work, range(num_parts))
    if num_parts == 1:
        return found[0]
    joined: _Rows = _joined([found[part] for part in range(num_parts)])
    return joined


def padded(
    rows: torch.Tensor,  # [n, ...]
    step: int,
) -> torch.Tensor:
    """The rows, and zero rows up to a multiple of `step`, so that nothing is left over."""
    num_missing = -len(rows) % step
    if not num_missing:
        return rows
    return torch.cat((rows, rows.new_zeros((num_missing, *rows.shape[1:]))))


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, tuple):
        return tuple(map(_joined, zip(*parts, strict=True)))
    names = [field.name for field in fields(first)]
    return type(first)(*(_joined([getattr(part, name) for part in parts]) for name in names))


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "tiles", initializer=torch_alone)
