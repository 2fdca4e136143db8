"""Products of rows with block-FP8 matrices, each group of rows with its own: a rank's experts.

Both parts of a split row are multiplied as e4m3, so bf16 activations lose nothing; each 128
columns' sum is scaled and added in fp32. How many rows a group has stays on the device: the
programs that are launched share out what tiles there are.

Few rows cost what their matrices' bytes cost; where these have too few tiles to fill the device,
programs share a tile's columns, and their sums are added in order. Many rows of one matrix go to
`grouped_fp8_hopper`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.engine.kernels import grouped_fp8_hopper
from shared.engine.kernels.split_rows import BLOCK, SplitRows

_COLUMNS = 128  # of a tile
_PROCESSORS = 132  # of an H200
_SHARED = 240  # programs that share few tiles' columns: less than two a processor
_LEAST_BLOCKS = 4  # of 128 of a matrix's columns a program: fewer do not pay for a second step
_ADDED_COLUMNS = 512  # a program's, of one row
_MOST_FEW = 256  # rows of one matrix: more are computed in tiles of 128


class _Tile(NamedTuple):
    rows: int
    stages: int
    programs: int  # that fit a processor


def grouped_fp8(
    rows: SplitRows,  # n of them, group after group
    weight: torch.Tensor,  # [groups, out, in] e4m3, contiguous; out and in multiples of 128
    weight_scales: torch.Tensor,  # [groups, out / 128, in / 128] fp32, contiguous
    ends: torch.Tensor,  # [groups] int32, ascending: the row behind each group's last; above n: n
    out: torch.Tensor,  # [m, width] bf16, width up to the matrices' out; written in place
    targets: torch.Tensor | None = None,  # [n] int64: where row i's product goes; None: to row i
) -> None:
    """Row targets[i] of out becomes the product of row i with its group's matrix.

    Meaning: reference.fp8_products.grouped_fp8. Rows behind the last group are left out. Hopper
    adds FP8 products with about 14 bits: an error of some 1e-3 of a row's root mean square, less
    than the result's rounding to bf16. A row's bits depend on itself and its matrix, and on the
    number of rows only by the size of tiles.
    """
    num_rows = rows.parts.shape[1]
    _check(rows, weight, weight_scales, ends, out)
    _check_targets(targets, num_rows)
    if not num_rows:
        return
    if out.is_cuda and len(weight) == 1 and num_rows > _MOST_FEW:
        grouped_fp8_hopper.multiply(rows, weight, weight_scales, ends, out, targets)
    else:
        _multiply_in_small_tiles(rows, weight, weight_scales, ends, out, targets)


def _check(
    rows: SplitRows,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    groups, height, inner = weight.shape
    if height % BLOCK or inner % BLOCK:
        raise ValueError(f"a matrix of {height} x {inner}; both must be multiples of {BLOCK}")
    num_rows = rows.parts.shape[1]
    for name, part, dtype, shape in (
        ("parts", rows.parts, torch.float8_e4m3fn, (2, num_rows, inner)),
        ("scales", rows.scales.t(), torch.float32, (inner // BLOCK, num_rows)),
        ("weight", weight, torch.float8_e4m3fn, weight.shape),
        ("weight_scales", weight_scales, torch.float32, (groups, height // BLOCK, inner // BLOCK)),
        ("ends", ends, torch.int32, (groups,)),
    ):
        if part.dtype != dtype or part.shape != shape or not part.is_contiguous():
            raise ValueError(f"{name}: a contiguous {dtype} tensor of shape {tuple(shape)}")
    if out.dtype != torch.bfloat16 or out.stride(1) != 1 or out.shape[1] > height:
        raise ValueError(f"out is bf16 of adjacent columns, {height} of them at most")


def _check_targets(targets: torch.Tensor | None, num_rows: int) -> None:
    if targets is None:
        return
    if targets.dtype != torch.int64 or targets.shape != (num_rows,) or not targets.is_contiguous():
        raise ValueError(f"targets are {num_rows} int64 numbers, contiguous")


def _multiply_in_small_tiles(
    rows: SplitRows,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    targets: torch.Tensor | None,
) -> None:
    groups, height, inner = weight.shape
    num_rows, width, num_blocks = rows.parts.shape[1], out.shape[1], inner // BLOCK
    num_columns = triton.cdiv(width, _COLUMNS)
    tile = _tile(num_rows, groups)
    blocks = _blocks_a_program(num_blocks, groups * num_columns)
    splits = triton.cdiv(num_blocks, blocks)
    most_tiles = (num_rows // tile.rows + min(groups, num_rows)) * num_columns
    sums = out[None]
    if splits > 1:
        sums = out.new_empty((splits, num_rows, width), dtype=torch.float32)
    _multiply[min(most_tiles, tile.programs * _PROCESSORS), splits](
        TensorDescriptor.from_tensor(rows.parts.view(-1, inner), [tile.rows, BLOCK]),
        rows.scales,
        TensorDescriptor.from_tensor(weight.view(-1, inner), [_COLUMNS, BLOCK]),
        weight_scales,
        ends,
        num_rows,
        sums,
        sums.stride(0),
        sums.stride(1),
        targets if splits == 1 else None,
        groups,
        width,
        height,
        num_blocks,
        blocks,
        num_columns,
        GROUPS=triton.next_power_of_2(groups),
        ROWS=tile.rows,
        COLUMNS=_COLUMNS,
        STAGES=tile.stages,
        num_warps=4,
    )
    if splits > 1:
        _add[num_rows, triton.cdiv(width, _ADDED_COLUMNS)](
            sums,
            splits,
            sums.stride(0),
            ends[-1:],
            num_rows,
            out,
            out.stride(0),
            targets,
            width,
            COLUMNS=_ADDED_COLUMNS,
            num_warps=2,
        )


def _tile(num_rows: int, groups: int) -> _Tile:
    """The small one reads a matrix again for every sixteen rows, so it is for fewer of one matrix.

    Over several it gains with the one product of an expert what it loses with the other.
    """
    if groups == 1 and num_rows <= 16:
        return _Tile(rows=16, stages=4, programs=3)
    return _Tile(rows=64, stages=3, programs=2)


def _blocks_a_program(num_blocks: int, num_tiles: int) -> int:
    """Blocks of a matrix's columns that one program adds, so that enough programs share the work.

    Of the matrices alone: however many rows there are, they are added in the same order.
    """
    splits = max(1, min(_SHARED // num_tiles, num_blocks // _LEAST_BLOCKS))
    return -(-num_blocks // splits)


@triton.jit(
    do_not_specialize=["num_rows", "groups", "num_blocks", "blocks_a_program", "num_columns"]
)
def _multiply(
    rows,  # descriptor of [2 * num_rows, num_blocks * 128] e4m3: first parts, then second ones
    row_scales,  # [num_blocks, num_rows] fp32
    weight,  # descriptor of [groups * height, num_blocks * 128] e4m3
    weight_scales,  # [groups * height / 128, num_blocks] fp32
    ends,  # [groups] int32
    num_rows,  # n
    sums,  # [splits, m, width]: out itself in bf16, or fp32 to be added
    split_stride,
    sum_stride,
    targets,  # [n] int64 or None
    groups,
    width,
    height,
    num_blocks,
    blocks_a_program,
    num_columns,  # tiles of them
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    number = tl.arange(0, GROUPS)
    end = tl.load(ends + number, mask=number < groups, other=0)
    start = tl.load(ends + number - 1, mask=(number > 0) & (number < groups), other=0)
    end = tl.minimum(end, num_rows)
    last_tile = tl.cumsum((tl.maximum(end - start, 0) + ROWS - 1) // ROWS, 0) * num_columns
    num_tiles = tl.max(last_tile, 0)
    first_block = tl.program_id(1) * blocks_a_program
    last_block = tl.minimum(first_block + blocks_a_program, num_blocks)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group = tl.sum((last_tile <= tile).to(tl.int32), 0)
        first_tile = tl.max(tl.where(number < group, last_tile, 0), 0)
        first_row = tl.max(tl.where(number < group, end, 0), 0)
        group_end = tl.max(tl.where(number == group, end, 0), 0)
        # Tiles of the same columns stand side by side: the matrix is read once.
        row_tiles = (group_end - first_row + ROWS - 1) // ROWS
        first_row += (tile - first_tile) % row_tiles * ROWS
        first_column = (tile - first_tile) // row_tiles * COLUMNS
        row = first_row + tl.arange(0, ROWS)
        live = row < group_end
        matrix_row = group * height + first_column
        scales_at = row_scales + first_block.to(tl.int64) * num_rows + row
        weight_scales_at = weight_scales + (matrix_row // 128).to(tl.int64) * num_blocks
        scale = tl.load(scales_at, mask=live, other=0.0)
        weight_scale = tl.load(weight_scales_at + first_block)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for block in tl.range(first_block, last_block, num_stages=STAGES):
            high = rows.load([first_row, block * 128])
            low = rows.load([num_rows + first_row, block * 128])
            codes = weight.load([matrix_row, block * 128])
            both = scale * weight_scale
            is_more = block + 1 < last_block
            scales_at += num_rows
            scale = tl.load(scales_at, mask=live & is_more, other=0.0)
            weight_scale = tl.load(weight_scales_at + block + 1, mask=is_more, other=0.0)
            if ROWS == 16:
                # Tiles this small are multiplied in fp16, which holds the sum of both parts.
                values = high.to(tl.float16) + low.to(tl.float16)
                product = tl.dot(values, codes.to(tl.float16).T)
            else:
                product = tl.dot(low, codes.T, tl.dot(high, codes.T))
            total += product * both[:, None]
        target = row.to(tl.int64)
        if targets is not None:
            target = tl.load(targets + row, mask=live, other=0)
        column = first_column + tl.arange(0, COLUMNS)
        split_at = sums + tl.program_id(1).to(tl.int64) * split_stride
        to = split_at + target[:, None] * sum_stride + column[None, :]
        tl.store(
            to, total.to(sums.dtype.element_ty), mask=live[:, None] & (column < width)[None, :]
        )


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _add(
    sums,  # [splits, n, width] fp32
    splits,
    split_stride,
    end,  # [1] int32
    num_rows,  # n
    out,  # [m, width] bf16, rows out_stride apart
    out_stride,
    targets,  # [n] int64 or None
    width,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.minimum(tl.load(end), num_rows):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        at = sums + row * width + column
        for _ in range(splits):
            total += tl.load(at, mask=column < width, other=0.0)
            at += split_stride
        target = row
        if targets is not None:
            target = tl.load(targets + row)
        tl.store(out + target * out_stride + column, total.to(tl.bfloat16), mask=column < width)
