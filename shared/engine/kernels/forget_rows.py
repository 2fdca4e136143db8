"""Takes rewritten rows out of the hot tables: their copies in hot rows are stale.

The CPU twin is `HotRows.forget`.
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.hot_tables import HotTables


def forget_rows(
    host_rows: torch.Tensor,  # [num_requests, num_rows] int32 rewritten rows, -1 = none
    leases: torch.Tensor,  # [num_requests] int32, -1 = none
    tables: HotTables,  # changed in place, all groups
) -> None:
    """Empty the hot rows that hold a rewritten row. Meaning: reference.residency.forget_rows."""
    if host_rows.dtype != torch.int32 or host_rows.dim() != 2 or not host_rows.is_contiguous():
        raise ValueError("host_rows must be [num_requests, num_rows] int32, contiguous")
    if leases.dtype != torch.int32 or leases.shape != host_rows.shape[:1]:
        raise ValueError(f"leases must be {len(host_rows)} int32 numbers")
    if not host_rows.numel():
        return
    num_groups, num_leases, hot_rows = tables.keys.shape
    _forget_rows[(len(host_rows), num_groups)](
        host_rows,
        leases,
        tables.keys,
        num_leases,
        NUM_ROWS=host_rows.shape[1],
        HOT_ROWS=hot_rows,
        HOT=triton.next_power_of_2(hot_rows),
        num_warps=8,
    )


@triton.jit
def _forget_rows(
    host_rows,  # [num_requests, NUM_ROWS]
    leases,
    keys,  # [num_groups, num_leases, HOT_ROWS]
    num_leases,
    NUM_ROWS: tl.constexpr,
    HOT_ROWS: tl.constexpr,
    HOT: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lease = tl.load(leases + request).to(tl.int64)
    slot = tl.arange(0, HOT)
    inside = (slot < HOT_ROWS) & (lease >= 0)
    at = (tl.program_id(1).to(tl.int64) * num_leases + lease) * HOT_ROWS + slot
    key = tl.load(keys + at, mask=inside, other=-1)
    is_stale = key < -1
    for number in tl.static_range(NUM_ROWS):
        is_stale = is_stale | (key == tl.load(host_rows + request * NUM_ROWS + number))
    # An empty row equals "none" and stays empty.
    tl.store(keys + at, -1, mask=inside & is_stale)
