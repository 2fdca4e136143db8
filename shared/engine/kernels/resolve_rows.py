"""Where the positions that a step selected lie on the device, and which rows must be fetched first.

One program a request: all its query rows' selections are one set, so no row that the step reads is
evicted. Resident pages are used in place; other rows are looked up in the request's leased hot
rows by host row, and the missing ones take the least recently used. Cost grows with the selection
and the hot rows, never with the context. After HiSparse; the CPU twin is `HostTier.resolve` with
`HotRows.look_up`. Nothing here waits for the host or depends on it.
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.hot_tables import BatchBlocks, HotTables, Resolution
from shared.engine.kv.layout import BLOCK_TOKENS


def resolve_rows(
    positions: torch.Tensor,  # [num_requests, num_queries, top_k] int32, -1 = none
    blocks: BatchBlocks,  # a request without a lease has resident rows only
    tables: HotTables,
    group_idx: int,
    scratch: torch.Tensor,  # from make_scratch, for at least so many requests
    out: Resolution,
) -> None:
    """Fill `out` and bring the group's tables to the state after the plan's copies.

    A plan lists a request's missing rows in the order in which its
    positions name them first. Meaning: reference.residency.resolve_rows.
    """
    _check(positions, blocks, tables, scratch, out)
    num_requests, num_selected = len(positions), positions[0].numel() if len(positions) else 0
    if not num_requests or not num_selected:
        return
    hot_rows = tables.keys.shape[-1]
    _resolve_rows[(num_requests,)](
        positions,
        blocks.page_table,
        blocks.page_table.stride(0),
        blocks.leases,
        blocks.first_rows,
        tables.pages,
        tables.keys[group_idx],
        tables.order[group_idx],
        out.row_ids,
        out.plan.host_rows,
        out.plan.device_rows,
        out.plan.num_misses,
        out.counts,
        scratch,
        scratch.stride(0),
        NUM_SELECTED=num_selected,
        SELECTED=triton.next_power_of_2(num_selected),
        HOT_ROWS=hot_rows,
        HOT=triton.next_power_of_2(hot_rows),
        num_warps=8,
    )


def _check(
    positions: torch.Tensor,
    blocks: BatchBlocks,
    tables: HotTables,
    scratch: torch.Tensor,
    out: Resolution,
) -> None:
    page_table, leases, first_rows = blocks.page_table, blocks.leases, blocks.first_rows
    if positions.dtype != torch.int32 or positions.shape != out.row_ids.shape:
        raise ValueError(f"positions must be int32 of the shape {tuple(out.row_ids.shape)}")
    if page_table.dtype != torch.int32 or page_table.dim() != 2 or page_table.stride(1) != 1:
        raise ValueError("page_table must be [num_requests, max_blocks] int32")
    if leases.dtype != torch.int32 or first_rows.dtype != torch.int64:
        raise ValueError("leases must be int32, first_rows int64")
    if not len(positions) == len(page_table) == len(leases):
        raise ValueError("positions, page_table and leases must be of equally many requests")
    if not (positions.is_contiguous() and leases.is_contiguous() and first_rows.is_contiguous()):
        raise ValueError("positions, leases and first_rows must be contiguous")
    selected, hot_rows = out.plan.host_rows.shape[-1], tables.keys.shape[-1]
    if selected > hot_rows:
        raise ValueError(f"{hot_rows} hot rows are fewer than the {selected} a step can select")
    if len(scratch) < len(positions) or scratch.shape[1] != len(first_rows) * BLOCK_TOKENS:
        raise ValueError(f"scratch must map the host rows of {len(first_rows)} blocks")
    if len(first_rows) * BLOCK_TOKENS >= 2**31:
        raise ValueError(f"host rows of {len(first_rows)} blocks are no 32-bit numbers")


@triton.jit
def _resolve_rows(
    positions,  # [num_requests, NUM_SELECTED]
    page_table,
    page_table_stride,
    leases,
    first_rows,
    pages,  # [num_leases, HOT_ROWS / 64]
    keys,  # [num_leases, HOT_ROWS]
    order,  # [num_leases, HOT_ROWS]
    row_ids,  # [num_requests, NUM_SELECTED]
    plan_host_rows,  # [num_requests, NUM_SELECTED]
    plan_device_rows,
    num_misses,
    counts,  # [num_requests, 3]
    scratch,
    scratch_stride,
    NUM_SELECTED: tl.constexpr,
    SELECTED: tl.constexpr,
    HOT_ROWS: tl.constexpr,
    HOT: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SELECTED)
    inside = lane < NUM_SELECTED
    at = request * NUM_SELECTED + lane
    position = tl.load(positions + at, mask=inside, other=-1)
    block = tl.load(
        page_table + request * page_table_stride + (position >> 6), mask=position >= 0, other=0
    )
    first = tl.load(first_rows + block, mask=position >= 0, other=-1)
    offset = position & 63
    is_resident = (position >= 0) & (first >= 0)
    is_cold = (position >= 0) & (first < 0)
    row = tl.where(is_resident, first + offset, -1).to(tl.int32)
    num_cold = tl.sum(is_cold.to(tl.int32))
    lease = tl.load(leases + request).to(tl.int64)
    num_hits = 0
    num_missing = 0
    if (num_cold > 0) & (lease >= 0):
        row, num_hits, num_missing = _look_up(
            block * 64 + offset,
            is_cold,
            row,
            lane,
            pages + lease * (HOT_ROWS // 64),
            keys + lease * HOT_ROWS,
            order + lease * HOT_ROWS,
            plan_host_rows + request * NUM_SELECTED,
            plan_device_rows + request * NUM_SELECTED,
            scratch + request * scratch_stride,
            HOT_ROWS,
            HOT,
        )
        num_cold = 0
    tl.store(row_ids + at, row, mask=inside)
    tl.store(num_misses + request, num_missing)
    tl.store(counts + request * 3, tl.sum(is_resident.to(tl.int32)))
    tl.store(counts + request * 3 + 1, num_hits)
    tl.store(counts + request * 3 + 2, num_cold)


@triton.jit
def _look_up(
    key,  # [lanes] host rows
    is_wanted,
    row,  # [lanes] what the other lanes keep
    lane,
    pages,  # from here on all is one lease's and one request's
    keys,
    order,
    plan_host_rows,
    plan_device_rows,
    scratch,  # by host row
    HOT_ROWS: tl.constexpr,
    HOT: tl.constexpr,
):
    """Device rows of the wanted keys, the plan written; the numbers of rows found and missing.

    A wanted row's place in the scratch holds first the lane that stands for it, then -1 - its hot
    row; barriers part the two, since lanes write each other's places.
    """
    # Of equal keys the first lane stands for all, whichever order the lanes ran in.
    tl.atomic_min(scratch + key, lane, mask=is_wanted, sem="relaxed")
    tl.debug_barrier()
    is_first = is_wanted & (tl.load(scratch + key, mask=is_wanted, other=-1) == lane)
    num_unique = tl.sum(is_first.to(tl.int32))
    num_hits = _age(keys, order, scratch, num_unique, HOT_ROWS, HOT)
    num_missing = num_unique - num_hits
    tl.debug_barrier()
    is_missing = tl.load(scratch + key, mask=is_first, other=-1) >= 0
    rank = tl.cumsum(is_missing.to(tl.int32), 0) - 1
    victims = order + (HOT_ROWS - num_hits - num_missing)
    victim = tl.load(victims + rank, mask=is_missing, other=0).to(tl.int32)
    tl.store(keys + victim, key, mask=is_missing)
    tl.store(scratch + key, -1 - victim, mask=is_missing)
    tl.debug_barrier()
    slot = -1 - tl.load(scratch + key, mask=is_wanted, other=-1)
    page = tl.load(pages + (slot >> 6), mask=is_wanted, other=0)
    row = tl.where(is_wanted, page * 64 + (slot & 63), row)
    tl.store(plan_host_rows + rank, key, mask=is_missing)
    tl.store(plan_device_rows + rank, row, mask=is_missing)
    tl.debug_barrier()
    tl.store(scratch + key, 2147483647, mask=is_first)
    return row, num_hits, num_missing


@triton.jit
def _age(
    keys,
    order,
    scratch,
    num_unique,
    HOT_ROWS: tl.constexpr,
    HOT: tl.constexpr,
):
    """Find the wanted hot rows, note them in the scratch, and renew the order.

    The new order: rows that are kept but not wanted, the victims, the wanted ones. Victims are
    the empty rows, then the least recently used. Returns the number of rows found.
    """
    place = tl.arange(0, HOT)
    inside = place < HOT_ROWS
    slot = tl.load(order + place, mask=inside, other=0).to(tl.int32)
    key = tl.load(keys + slot, mask=inside, other=-1)
    is_empty = inside & (key < 0)
    is_hit = tl.load(scratch + key, mask=key >= 0, other=2147483647) != 2147483647
    # Both counts in one scan.
    counted = tl.cumsum(is_hit.to(tl.int32) * 65536 + is_empty.to(tl.int32), 0)
    total = tl.max(counted, 0)
    num_hits = total >> 16
    num_victims = num_unique - num_hits
    hits, empties = counted >> 16, counted & 65535
    age = tl.where(is_empty, empties - 1, (total & 65535) + place - hits - empties)
    kept = HOT_ROWS - num_hits - num_victims
    unwanted = tl.where(age < num_victims, kept + age, age - num_victims)
    new_place = tl.where(is_hit, HOT_ROWS - num_hits + hits - 1, unwanted)
    # Every lane has read the order and its own place in the scratch.
    tl.debug_barrier()
    tl.store(order + new_place, slot.to(tl.int16), mask=inside)
    tl.store(scratch + key, -1 - slot, mask=is_hit)
    return num_hits
