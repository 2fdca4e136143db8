"""Copies missing rows straight from pinned host memory into their hot rows.

The kernel reads the host itself: a copy call a row would be hundreds of times slower. Reads cross
PCIe, so a few programs fill the link (eight bring 42 of the 44 GB/s that sixteen do, on an H200). A
matrix kernel takes all multiprocessors that it is given and would starve them: leave it the others.
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.hot_tables import MissPlan
from shared.engine.kernels.rows import ROW_BYTES

_TILE_ROWS = 99  # four 16-byte words a thread
_WORDS = tl.constexpr(ROW_BYTES // 8)


def host_gather(
    host_rows: torch.Tensor,  # [num_host_rows, 656] uint8, one layer's, pinned
    device_rows: torch.Tensor,  # [num_device_rows, 656] uint8, the layer's, written in place
    plan: MissPlan,
    num_programs: int,  # of 32 warps: as many multiprocessors as are kept free for them
) -> None:
    """Copy every missing row of the plan. Meaning: reference.residency.host_gather."""
    for name, rows in (("host_rows", host_rows), ("device_rows", device_rows)):
        if rows.dtype != torch.uint8 or rows.shape[1:] != (ROW_BYTES,) or not rows.is_contiguous():
            raise ValueError(f"{name} must be [n, {ROW_BYTES}] bytes, contiguous")
        if rows.storage_offset() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes")
    if num_programs < 1:
        raise ValueError(f"{num_programs} programs copy nothing")
    num_requests = len(plan.num_misses)
    if not num_requests:
        return
    _host_gather[(num_programs,)](
        host_rows.view(torch.int64),
        device_rows.view(torch.int64),
        plan.host_rows,
        plan.device_rows,
        plan.host_rows.stride(0),
        plan.num_misses,
        num_requests,
        REQUESTS=triton.next_power_of_2(num_requests),
        TILE_ROWS=_TILE_ROWS,
        TILE=triton.next_power_of_2(_TILE_ROWS * ROW_BYTES // 8),
        num_warps=32,
    )


@triton.jit
def _host_gather(
    host,  # [num_host_rows, _WORDS]
    device,  # [num_device_rows, _WORDS]
    plan_host_rows,
    plan_device_rows,
    plan_stride,
    num_misses,
    num_requests,
    REQUESTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    # Tiles are numbered request by request: neighbours in time read one request's region.
    request = tl.arange(0, REQUESTS)
    count = tl.load(num_misses + request, mask=request < num_requests, other=0)
    ends = tl.cumsum((count + TILE_ROWS - 1) // TILE_ROWS, 0)
    word = tl.arange(0, TILE)
    num_items = tl.max(ends, 0)
    item = tl.program_id(0)
    while item < num_items:
        is_before = ends <= item
        owner = tl.sum(is_before.to(tl.int32))
        tile = item - tl.max(tl.where(is_before, ends, 0), 0)
        number = tile * TILE_ROWS + word // _WORDS
        live = (word < TILE_ROWS * _WORDS) & (number < tl.load(num_misses + owner))
        at = owner.to(tl.int64) * plan_stride + number
        source = tl.load(plan_host_rows + at, mask=live, other=0).to(tl.int64)
        target = tl.load(plan_device_rows + at, mask=live, other=0).to(tl.int64)
        row = tl.load(host + source * _WORDS + word % _WORDS, mask=live)
        tl.store(device + target * _WORDS + word % _WORDS, row, mask=live)
        item += tl.num_programs(0)
