"""How long simulated work takes, from published figures for GLM-5.2-FP8 on eight H200s.

Prefill: the table that aiconfigurator 0.12 gives for `h200_sxm` with context parallelism over 8
GPUs. Decode: its DP8 figures, 22 ms a step alone and 49 ms with 16 requests a rank, and the
published acceptance of 2.99 tokens a step. Link: an RDMA NIC at 40 GB/s.
"""

from bisect import bisect_right

from services.router.view import Rates

CHUNK_TOKENS = 8192
RATES = Rates(prefill_tokens_per_s=20_000, link_bytes_per_s=40e9)
KV_BYTES_PER_TOKEN = 54_728

_CONTEXTS = (0, 102_400, 196_608, 524_288)
_NEW = (512, 2048, 8192, 16_384)
_MS = ((105, 138, 278, 477), (119, 157, 377, 752), (132, 173, 394, 777), (164, 205, 468, 905))
_DECODE_ALONE_S, _DECODE_PER_REQUEST_S = 0.022, (0.049 - 0.022) / 15
_TOKENS_PER_STEP = 2.99


def prefill_step_s(num_new: int, num_context: float) -> float:
    """One step that computes num_new tokens behind num_context others (their mean)."""
    low, share = _place(_CONTEXTS, num_context)
    before, after = (_interpolated(_MS[row], num_new) for row in (low, low + 1))
    return (before + share * (after - before)) / 1000


def import_s(num_tokens: int) -> float:
    """The KV of so many tokens over the link."""
    return num_tokens * KV_BYTES_PER_TOKEN / RATES.link_bytes_per_s


def decode_s(num_tokens: int, num_running: int) -> float:
    """An answer of so many tokens beside the others that run when it starts."""
    step_s = _DECODE_ALONE_S + _DECODE_PER_REQUEST_S * (num_running - 1)
    return num_tokens / _TOKENS_PER_STEP * step_s


def _interpolated(row: tuple[int, ...], num_new: int) -> float:
    # Below the first column a step is bound by its launches and costs as much.
    low, share = _place(_NEW, max(_NEW[0], num_new))
    return row[low] + share * (row[low + 1] - row[low])


def _place(grid: tuple[int, ...], value: float) -> tuple[int, float]:
    low = min(bisect_right(grid, value), len(grid) - 1) - 1
    return low, (value - grid[low]) / (grid[low + 1] - grid[low])
