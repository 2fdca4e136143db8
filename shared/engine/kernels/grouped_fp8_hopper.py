"""Products of many rows with one matrix, for `grouped_fp8`: one warp brings tiles, eight multiply.

While one group of four scales and adds the 128 columns that it has multiplied, the other
multiplies.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shared.engine.kernels.split_rows import SplitRows

_TILE = gl.constexpr(128)  # rows, matrix rows and columns at a time
_HALF = gl.constexpr(64)  # rows of each group of warps
_STAGES = 4
_BAND = gl.constexpr(16)  # tiles of rows that share a tile of the matrix in the L2 cache
_CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_MAX_REGISTERS = 168  # of 384 threads; those that multiply get 232, the one that brings 40


def multiply(
    rows: SplitRows,
    weight: torch.Tensor,  # [1, height, in] e4m3
    weight_scales: torch.Tensor,  # [1, height / 128, in / 128] fp32
    ends: torch.Tensor,  # [1] int32
    out: torch.Tensor,  # [m, width] bf16, written in place
    targets: torch.Tensor | None,  # [n] int64
) -> None:
    """See grouped_fp8, which has checked all of it."""
    inner = weight.shape[2]
    processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    _multiply[(processors,)](
        TensorDescriptor.from_tensor(rows.parts.view(-1, inner), [64, 128], _CODES),
        rows.scales,
        TensorDescriptor.from_tensor(weight.view(-1, inner), [128, 128], _CODES),
        weight_scales,
        ends,
        rows.parts.shape[1],
        out,
        out.stride(0),
        targets,
        out.shape[1],
        inner // 128,
        triton.cdiv(out.shape[1], 128),
        STAGES=_STAGES,
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
    )


@gluon.jit(do_not_specialize=["num_rows", "num_blocks", "num_columns"])
def _multiply(
    rows,  # descriptor of [2 * num_rows, num_blocks * 128] e4m3: first parts, then second ones
    row_scales,  # [num_blocks, num_rows] fp32
    weight,  # descriptor of [height, num_blocks * 128] e4m3
    weight_scales,  # [height / 128, num_blocks] fp32
    ends,  # [1] int32
    num_rows,  # n
    out,  # [m, width] bf16, rows out_stride apart
    out_stride,
    targets,  # [n] int64 or None
    width,
    num_blocks,
    num_columns,  # tiles of them
    STAGES: gl.constexpr,
):
    # A stage: the first parts of both halves of its rows, then the second parts; the matrix.
    row_tiles = gl.allocate_shared_memory(gl.float8e4nv, [4 * STAGES, _HALF, _TILE], rows.layout)
    code_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _TILE, _TILE], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    buffers = (row_tiles, code_tiles, full, free)
    end = gl.minimum(gl.load(ends), num_rows)
    sizes = (end, num_rows, num_blocks, num_columns)
    scales = (row_scales, weight_scales)
    target = (out, out_stride, targets, width)
    gl.warp_specialize(
        [
            (_multiply_half, (0, buffers, scales, sizes, target, STAGES)),
            (_multiply_half, (1, buffers, scales, sizes, target, STAGES)),
            (_bring, (rows, weight, buffers, sizes, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _position(place, high, num_columns):
    """A tile's first row and column: a band of rows, column after column."""
    band_tiles = _BAND * num_columns
    band = place // band_tiles * _BAND
    high = gl.minimum(high - band, _BAND)
    place = place % band_tiles
    return (band + place % high) * _TILE, place // high * _TILE


@gluon.jit
def _bring(rows, weight, buffers, sizes, STAGES: gl.constexpr):
    row_tiles, code_tiles, full, free = buffers
    end, num_rows, num_blocks, num_columns = sizes
    stage = 0
    parity = 1  # the first wait for a free buffer must not block
    high = gl.cdiv(end, _TILE)
    for place in range(gl.program_id(0), high * num_columns, gl.num_programs(0)):
        row, column = _position(place, high, num_columns)
        for block in range(num_blocks):
            at = block * _TILE
            ready = full.index(stage)
            mbarrier.wait(free.index(stage), parity)
            mbarrier.expect(ready, 3 * _TILE * _TILE)
            tma.async_copy_global_to_shared(weight, [column, at], ready, code_tiles.index(stage))
            for part in gl.static_range(2):
                for half in gl.static_range(2):
                    tile = row_tiles.index(4 * stage + 2 * part + half)
                    first = part * num_rows + row + half * _HALF
                    tma.async_copy_global_to_shared(rows, [first, at], ready, tile)
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1


@gluon.jit
def _multiply_half(HALF: gl.constexpr, buffers, scales, sizes, target, STAGES: gl.constexpr):
    row_tiles, code_tiles, full, free = buffers
    row_scales, weight_scales = scales
    end, num_rows, num_blocks, num_columns = sizes
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 32])
    sums = gl.zeros([_HALF, _TILE], gl.float32, ACC)
    stage = 0
    parity = 0
    high = gl.cdiv(end, _TILE)
    for place in range(gl.program_id(0), high * num_columns, gl.num_programs(0)):
        row, column = _position(place, high, num_columns)
        row += HALF * _HALF
        scale_row = row + gl.arange(0, _HALF, gl.SliceLayout(1, ACC))
        live = scale_row < end
        scale_at = row_scales + scale_row
        weight_scale_at = weight_scales + column // _TILE * num_blocks
        # Scales are read two blocks ahead.
        scale = gl.load(scale_at, mask=live, other=0.0) * gl.load(weight_scale_at)
        scale_at += num_rows
        has_next = num_blocks > 1
        later = gl.load(scale_at, mask=live & has_next, other=0.0)
        later_weight = gl.load(weight_scale_at + 1, mask=has_next, other=0.0)
        total = gl.zeros([_HALF, _TILE], gl.float32, ACC)
        for block in range(num_blocks):
            mbarrier.wait(full.index(stage), parity)
            codes = code_tiles.index(stage).permute((1, 0))
            for part in gl.static_range(2):
                tile = row_tiles.index(4 * stage + 2 * part + HALF)
                sums = warpgroup_mma(tile, codes, sums, use_acc=part > 0, is_async=True)
            scale_at += num_rows
            has_next = block + 2 < num_blocks
            last = gl.load(scale_at, mask=live & has_next, other=0.0)
            last_weight = gl.load(weight_scale_at + block + 2, mask=has_next, other=0.0)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(free.index(stage), count=1)
            total += sums * gl.expand_dims(scale, 1)
            scale = later * later_weight
            later = last
            later_weight = last_weight
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
        _store(total, row, end, column, target)


@gluon.jit
def _store(total, first_row, end, first_column, target):
    out, out_stride, targets, width = target
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(total.to(gl.bfloat16), OUT)
    row = first_row + gl.arange(0, _HALF, gl.SliceLayout(1, OUT))
    column = gl.expand_dims(first_column + gl.arange(0, _TILE, gl.SliceLayout(0, OUT)), 0)
    place = row.to(gl.int64)
    if targets is not None:
        place = gl.load(targets + row, mask=row < end, other=0)
    to = out + gl.expand_dims(place * out_stride, 1) + column
    gl.store(to, values, mask=gl.expand_dims(row < end, 1) & (column < width))
