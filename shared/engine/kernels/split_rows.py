"""Splits bf16 activations into two e4m3 parts whose sum they are, for FP8 tensor cores.

bf16 has eight significant bits and e4m3 four: the first part is a value rounded to four, the second
what is left over. Together with a power of two per row and 128 columns they are the value itself,
but for values below 2**-9 of their group's largest, which are off by up to 2**-17 of it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shared.engine.kernels.e4m3 import encode, power_of_two, rounded, scale_exponent

BLOCK = 128  # columns, and rows of a matrix, that share a scale
_TILE_GROUPS = 16  # of 128 columns at a time: 4 KiB of bf16
_PROGRAMS = 8 * 132  # eight on each processor of an H200


class SplitRows(NamedTuple):
    """Rows as (parts[0] + parts[1]) * scales."""

    parts: torch.Tensor  # [2, n, in] e4m3
    scales: torch.Tensor  # [n, in / 128] fp32; those of one group of columns are adjacent


def split_rows(
    rows: torch.Tensor,  # [m, width] bf16, adjacent columns
    sources: torch.Tensor | None = None,  # [n] int64: the row to take as row i; None: all in order
    num_rows: torch.Tensor | None = None,  # [1] int32: only so many are made; None: all n
) -> SplitRows:
    """The rows in parts; `in` is width rounded up to 128, what lies beyond width is zero.

    Meaning: reference.fp8_products.split_rows. A group with a value that is not finite becomes NaN.
    """
    if rows.dtype != torch.bfloat16 or rows.stride(1) != 1:
        raise ValueError(f"rows are bf16 with adjacent columns, not {rows.dtype}")
    if sources is not None and (sources.dtype != torch.int64 or not sources.is_contiguous()):
        raise ValueError("sources are contiguous int64 numbers")
    _check_count(num_rows)
    length = len(rows) if sources is None else len(sources)
    split = _room(rows, length, rows.shape[1])
    if split.parts.numel():
        _split_rows[_grid(split)](
            rows,
            rows.stride(0),
            sources,
            num_rows,
            length,
            rows.shape[1],
            *split.parts.view(torch.uint8),
            split.scales,
            split.scales.shape[1],
            TILE_GROUPS=_TILE_GROUPS,
            num_warps=4,
        )
    return split


def split_gated(
    gate_up: torch.Tensor,  # [n, 2 * inner] bf16: gates, then ups; adjacent columns
    num_rows: torch.Tensor | None = None,  # [1] int32: only so many are made; None: all n
) -> SplitRows:
    """silu(gate) * up in parts, without being rounded to bf16; inner is a multiple of 128.

    Meaning: reference.fp8_products.split_gated.
    """
    if gate_up.dtype != torch.bfloat16 or gate_up.stride(1) != 1 or gate_up.shape[1] % (2 * BLOCK):
        raise ValueError(f"gates and ups are bf16, a multiple of {BLOCK} columns each")
    _check_count(num_rows)
    split = _room(gate_up, len(gate_up), gate_up.shape[1] // 2)
    if split.parts.numel():
        _split_gated[_grid(split)](
            gate_up,
            gate_up.stride(0),
            num_rows,
            len(gate_up),
            *split.parts.view(torch.uint8),
            split.scales,
            split.scales.shape[1],
            TILE_GROUPS=_TILE_GROUPS,
            num_warps=4,
        )
    return split


def _check_count(num_rows: torch.Tensor | None) -> None:
    if num_rows is not None and (num_rows.dtype != torch.int32 or num_rows.shape != (1,)):
        raise ValueError("the number of rows is one int32")


def _room(rows: torch.Tensor, length: int, width: int) -> SplitRows:
    num_groups = triton.cdiv(width, BLOCK)
    parts = rows.new_empty((2, length, num_groups * BLOCK), dtype=torch.float8_e4m3fn)
    return SplitRows(parts, rows.new_empty((num_groups, length), dtype=torch.float32).t())


def _grid(split: SplitRows) -> tuple[int]:
    return (min(triton.cdiv(split.scales.numel(), _TILE_GROUPS), _PROGRAMS),)


@triton.jit
def _live_tiles(num_rows, length, num_groups, TILE_GROUPS: tl.constexpr):
    """How many tiles there are to make, and the rows."""
    live = length
    if num_rows is not None:
        live = tl.minimum(tl.load(num_rows), length)
    return (tl.cast(live, tl.int64) * num_groups + TILE_GROUPS - 1) // TILE_GROUPS, live


@triton.jit
def _store_groups(
    values,  # [TILE_GROUPS, 128] fp32
    row,  # [TILE_GROUPS] int64
    group,  # [TILE_GROUPS] int64: the row's group of columns
    live,  # [TILE_GROUPS]
    high_parts,  # [length, num_groups * 128] uint8
    low_parts,
    scales,  # [num_groups, length] fp32
    length,
    num_groups,
):
    amax = tl.max(tl.abs(values), 1)
    exponent = scale_exponent(amax)
    # Multiplying by the inverse of a power of two is exact, and so is what is left over.
    values *= power_of_two(254 - exponent)[:, None]
    high = encode(values)
    low = encode(values - rounded(values))
    at = (row * num_groups + group)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(high_parts + at, high, mask=live[:, None])
    tl.store(low_parts + at, low, mask=live[:, None])
    scale = tl.where(amax < float("inf"), power_of_two(exponent), float("nan"))
    tl.store(scales + group * length + row, scale, mask=live)


@triton.jit(do_not_specialize=["length", "num_groups"])
def _split_rows(
    rows,  # [m, width] bf16, rows row_stride apart
    row_stride,
    sources,  # [n] int64 or None
    num_rows,  # [1] int32 or None
    length,  # n
    width,
    high_parts,
    low_parts,
    scales,
    num_groups,
    TILE_GROUPS: tl.constexpr,
):
    num_tiles, num_live = _live_tiles(num_rows, length, num_groups, TILE_GROUPS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        place = tl.cast(tile, tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        row, group = place // num_groups, place % num_groups
        live = row < num_live
        source = row
        if sources is not None:
            source = tl.load(sources + row, mask=live, other=0)
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        mask = live[:, None] & (column < width)
        values = tl.load(rows + source[:, None] * row_stride + column, mask=mask, other=0.0)
        values = values.to(tl.float32)
        _store_groups(values, row, group, live, high_parts, low_parts, scales, length, num_groups)


@triton.jit(do_not_specialize=["length", "num_groups"])
def _split_gated(
    gate_up,  # [n, 2 * num_groups * 128] bf16, rows row_stride apart
    row_stride,
    num_rows,  # [1] int32 or None
    length,  # n
    high_parts,
    low_parts,
    scales,
    num_groups,
    TILE_GROUPS: tl.constexpr,
):
    num_tiles, num_live = _live_tiles(num_rows, length, num_groups, TILE_GROUPS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        place = tl.cast(tile, tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        row, group = place // num_groups, place % num_groups
        live = row < num_live
        start = gate_up + row[:, None] * row_stride
        start += group[:, None] * 128 + tl.arange(0, 128)[None, :]
        gate = tl.load(start, mask=live[:, None], other=0.0).to(tl.float32)
        up = tl.load(start + num_groups * 128, mask=live[:, None], other=0.0).to(tl.float32)
        values = gate / (1.0 + tl.exp(-gate)) * up
        _store_groups(values, row, group, live, high_parts, low_parts, scales, length, num_groups)
