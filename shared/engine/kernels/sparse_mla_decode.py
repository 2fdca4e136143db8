"""Attention of decode's queries over their selected fp8_ds_mla rows, split over processors.

Rows lie in two pools that are numbered as one: what is resident, and what was fetched from the
host. The device code is in `sparse_mla_decode_hopper`; parts are merged by `combine_splits`.
"""

import functools
import math

import torch
import triton

from shared.engine.kernels.combine_splits import combine_splits
from shared.engine.kernels.sparse_mla_decode_hopper import REGISTERS, TILE_ROWS, WARPS, attend

_QUERY_DIM = 576
_VALUE_DIM = 512
_ROW_BYTES = 656
_NUM_HEADS = (8, 16, 32, 64)
_MAX_SPLITS = 32
# A block beside its tiles, in the time of a tile: start, query in, result out and its share of
# combining (one H200, 2026-11-30).
_SPLIT_COST_TILES = 6


def sparse_mla_decode(
    query: torch.Tensor,  # [num_queries, num_heads, 576] bf16: 512 latent, then 64 rope
    rows: torch.Tensor,  # [num_rows, 656] uint8
    row_ids: torch.Tensor,  # [num_queries, top_k] int32, -1 = none
    scale: float,
    *,
    hot_rows: torch.Tensor | None = None,  # [num_hot_rows, 656] uint8, numbered after rows
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [num_queries, num_heads, 512] bf16, [.., num_heads] fp32
    """Softmax attention of each query over its own rows, and the natural logarithm of its sum.

    Meaning: reference.sparse_decode.sparse_mla_decode. Each token of a request is a query. One
    without rows gets zeros and -inf; places behind a query's last row cost next to nothing. Rows
    hold values within +-65,504; beyond, a query that selects them gets no finite result.

    A query's bits depend on its own query, rows and places and on num_splits, not on the others.
    num_splits is `plan_splits` of the call's shapes if not given: give one where batches of
    several sizes must agree. Shapes alone decide what is launched and the host waits for nothing,
    so calls can be captured.
    """
    hot_rows = rows if hot_rows is None else hot_rows
    _check(query, rows, hot_rows, row_ids)
    num_queries, num_heads, _ = query.shape
    num_tiles = -(-row_ids.shape[1] // TILE_ROWS)
    if num_splits is not None and not 1 <= num_splits <= min(num_tiles, _MAX_SPLITS):
        raise ValueError(f"{num_splits} splits of {num_tiles} tiles, at most {_MAX_SPLITS}")
    out = query.new_empty((num_queries, num_heads, _VALUE_DIM))
    lse = query.new_empty((num_queries, num_heads), dtype=torch.float32)
    if not num_queries:
        return out, lse
    if num_splits is None:
        num_splits = plan_splits(num_queries, row_ids.shape[1], _num_processors(query.device))
    is_split = num_splits > 1
    parts, part_lses = out, lse
    if is_split:
        shape = (num_queries, num_splits, num_heads)
        parts = query.new_empty((*shape, _VALUE_DIM), dtype=torch.float32)
        part_lses = query.new_empty(shape, dtype=torch.float32)
    tiles_a_split = -(-num_tiles // num_splits)
    attend[(num_queries * num_splits,)](
        query,
        rows.view(torch.float8_e4m3fn),
        hot_rows.view(torch.float8_e4m3fn),
        len(rows),
        row_ids,
        parts,
        part_lses,
        scale * math.log2(math.e),
        row_ids.shape[1],
        tiles_a_split * TILE_ROWS,
        num_splits,
        NUM_HEADS=num_heads,
        WIDTH=max(128, triton.next_power_of_2(row_ids.shape[1])),
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
    if is_split:
        combine_splits(parts, part_lses, out, lse)
    return out, lse


def plan_splits(num_queries: int, top_k: int, num_processors: int) -> int:
    """How many blocks share a query: the fewest with which the last block ends soonest.

    Processors take one block at a time, and a block costs its tiles and a constant.
    """
    num_tiles = -(-top_k // TILE_ROWS)

    def duration(num_splits: int) -> tuple[int, int]:
        waves = -(-num_queries * num_splits // num_processors)
        return waves * (-(-num_tiles // num_splits) + _SPLIT_COST_TILES), num_splits

    # Every other number leaves a split without tiles.
    candidates = {-(-num_tiles // tiles) for tiles in range(1, num_tiles + 1)}
    return min((n for n in candidates if n <= _MAX_SPLITS), key=duration, default=1)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    query: torch.Tensor, rows: torch.Tensor, hot_rows: torch.Tensor, row_ids: torch.Tensor
) -> None:
    if query.dtype != torch.bfloat16 or query.dim() != 3 or query.shape[2] != _QUERY_DIM:
        raise ValueError(f"query must be [num_queries, num_heads, {_QUERY_DIM}] bf16")
    if query.shape[1] not in _NUM_HEADS:
        raise ValueError(f"{query.shape[1]} heads, supported are {_NUM_HEADS}")
    for name, pool in (("rows", rows), ("hot_rows", hot_rows)):
        if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] != _ROW_BYTES:
            raise ValueError(f"{name} must be [n, {_ROW_BYTES}] bytes")
        if not pool.is_contiguous() or pool.data_ptr() % 16:
            raise ValueError(f"{name} must be contiguous and begin at a multiple of 16 bytes")
    if row_ids.dtype != torch.int32 or row_ids.dim() != 2 or len(row_ids) != len(query):
        raise ValueError(f"row_ids must be [{len(query)}, top_k] int32")
    if not row_ids.shape[1]:
        raise ValueError("row_ids must have a place at least")
    if not (query.is_contiguous() and row_ids.is_contiguous()):
        raise ValueError("query and row_ids must be contiguous")
    if len(rows) + len(hot_rows) >= 2**31:
        raise ValueError(f"{len(rows) + len(hot_rows)} rows have no 32-bit numbers")
