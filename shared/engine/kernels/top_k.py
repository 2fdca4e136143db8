"""The best columns of each row of scores, exactly, in about one pass over the scores.

A block works on one row. A sample of the row gives a threshold that some more than k scores should
exceed; the pass collects what does, in column order; the exact choice is made among the collected.
Neither a bad sample nor equal scores en masse can make it wrong: when the collected fill their
room, all but the k best of them are dropped and the threshold rises to the k-th; when they end up
fewer than k, the row is read again with a threshold that everything exceeds.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shared.engine.kernels.block_order import THREADS, WARPS
from shared.engine.kernels.candidates import (
    FEW,
    ROOM,
    ROOM_BYTES,
    begin_row,
    choose,
    collect,
    estimate,
    open_stream,
    prefetch_sample,
)

MAX_K = 2048

_BLOCKS_A_PROCESSOR = 3
_TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)


def top_k(
    scores: torch.Tensor,  # [num_rows, num_columns] fp32; columns and rows' distance 16 n
    lengths: torch.Tensor,  # [num_rows] int32: only a row's first lengths[i] columns count
    k: int,  # 1..2048
    first: int = 0,  # the position of column 0
) -> torch.Tensor:  # [num_rows, k] int32 ascending, then -1 = none
    """Positions of each row's k best scores; equal scores go to the lower position.

    Meaning: reference.indexing.top_k. -0 equals 0, and NaN is below everything. The result depends
    on the row alone. Any scores are dealt with, in more time where the threshold is misjudged:
    rising scores and NaN en masse are worst.
    """
    _check(scores, lengths, k)
    num_rows, num_columns = scores.shape
    chosen = lengths.new_empty((num_rows, k))
    if not num_rows or not num_columns:
        return chosen.fill_(-1)
    num_blocks = min(num_rows, _num_processors(scores.device) * _BLOCKS_A_PROCESSOR)
    scratch = scores.new_empty((num_blocks + 1) * ROOM_BYTES // 4, dtype=torch.int32)
    scratch = scratch[-scratch.data_ptr() % ROOM_BYTES // 4 :]
    row_stride = scores.stride(0) if num_rows > 1 else num_columns
    num_groups = ((num_rows - 1) * row_stride + num_columns) // 16
    groups = scores.as_strided((num_groups, 16), (16, 1))
    _top_k[(num_blocks,)](
        TensorDescriptor.from_tensor(groups, [THREADS.value, 16], _TILE_LAYOUT),
        scores,
        lengths,
        chosen,
        scratch,
        num_rows,
        num_columns,
        row_stride,
        first,
        K=k,
        num_warps=WARPS.value,
        maxnreg=80,  # three blocks a processor
    )
    return chosen


@functools.cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> None:
    num_rows, num_columns = scores.shape
    if scores.dtype != torch.float32 or scores.stride(1) != 1:
        raise ValueError(f"scores are fp32 with adjacent columns, not {scores.dtype}")
    if num_columns % 16 or (num_rows > 1 and scores.stride(0) % 16):
        raise ValueError(f"{num_columns} columns, rows {scores.stride(0)} apart: not 16 n")
    if scores.data_ptr() % 16:
        raise ValueError("scores must be aligned to 16 bytes")
    if lengths.dtype != torch.int32 or lengths.shape != (num_rows,):
        raise ValueError(f"lengths are int32, one for each of {num_rows} rows")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k is {k}, not 1 to {MAX_K}")


@gluon.jit
def _top_k(
    tiles_of_scores,  # descriptor of the scores as [.., 16] fp32
    scores,  # [num_rows, num_columns] fp32, rows row_stride apart
    lengths,  # [num_rows] int32
    chosen,  # [num_rows, K] int32
    scratch,  # [num_blocks, 2, ROOM] int32
    num_rows,
    num_columns,
    row_stride,
    first,
    K: gl.constexpr,
):
    room = scratch + gl.program_id(0).to(gl.int64) * (2 * ROOM)
    stream = open_stream(tiles_of_scores)
    turn = gl.to_tensor(0)  # tiles read so far
    next_length = gl.minimum(gl.load(lengths + gl.program_id(0)), num_columns)
    begin_row(stream, gl.program_id(0) * (row_stride // 16), next_length, turn)
    for row in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        length = next_length
        next_row = row + gl.num_programs(0)
        next_length = gl.load(lengths + next_row, mask=next_row < num_rows, other=0)
        next_length = gl.minimum(next_length, num_columns)
        threshold = estimate(scores + row * row_stride.to(gl.int64), length, K)
        group = row * (row_stride // 16)
        count, turn = collect(stream, group, length, threshold, room, turn, K)
        # The next row is on its way while this one's candidates are sifted.
        begin_row(stream, next_row * (row_stride // 16), next_length, turn)
        prefetch_sample(scores + next_row * row_stride.to(gl.int64), next_length)
        gl.thread_barrier()
        out = chosen + row * gl.to_tensor(K).to(gl.int64)
        if count <= K:
            FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
            place = gl.arange(0, FEW, FOUR)
            column = gl.load(room + ROOM + place, mask=place < count, other=-1 - first)
            gl.store(out + place, column + first, mask=place < K)
        else:
            _, columns, to, is_best, _ = choose(room, count, K)
            gl.store(out + to, columns + first, mask=is_best)
        gl.thread_barrier()
