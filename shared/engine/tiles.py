"""Shares the tiles of one operation out over the compute threads.

A tile's products are too small for torch to split well: two threads gain a quarter on them, two
tiles at once a factor of two. What a tile computes never depends on who computes it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def spread(work: Callable[[Sequence[int]], None], tiles: Sequence[int]) -> None:
    """Call `work` with every tile in one of its parts, a thread each; raises what a part raised.

    Parts run at the same time and must write to different places. For one computing thread of a
    process: meanwhile torch itself uses one thread.
    """
    num_threads = min(torch.get_num_threads(), len(tiles))
    if num_threads < 2:
        work(tiles)
        return
    is_inference = torch.is_inference_mode_enabled()

    def run(part: Sequence[int]) -> None:
        with torch.inference_mode(is_inference):  # a mode of the thread
            work(part)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Causal tiles grow: every thread gets small and large ones.
        parts = [tiles[first::num_threads] for first in range(num_threads)]
        list(_threads(before).map(run, parts))
    finally:
        torch.set_num_threads(before)


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="tiles")
