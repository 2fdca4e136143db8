"""Scores of index keys for a prefill step's queries: the lightning indexer in FP8.

A block scores sixteen queries over a run of keys: one warp brings tiles of keys, and four groups of
four warps each hold four queries and read the same tiles, because keys arrive from the L2 cache no
faster than four such groups need them. While one group adds heads, others multiply.

Keys are the M side of the matrix product. On its N side heads and queries are dealt so that a
thread's accumulators are all heads of one query: heads are then added within a thread, and a score
costs two instructions behind the tensor cores.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_DIM = 128
_QUERIES = 16  # a block's: four for each of four groups of warps
_TILE_KEYS = 64
_RUN_COLUMNS = 8192  # for each a block: enough to pay for its queries, few enough to balance
_STAGES = 6
_KEY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def indexer_logits(
    query: torch.Tensor,  # [num_queries, heads, 128] e4m3
    weights: torch.Tensor,  # [num_queries, heads] fp32, the query's scale included
    keys: torch.Tensor,  # [num_keys, 128] e4m3, in position order, request after request
    key_scales: torch.Tensor,  # [num_keys] fp32
    starts: torch.Tensor,  # [num_queries] int32: the first key a query may choose
    ends: torch.Tensor,  # [num_queries] int32: the key behind its last
    logits: torch.Tensor,  # [num_queries, num_columns] fp32, written in place
) -> None:
    """Column j of row i becomes the score of key starts[i] + j, for j below ends[i] - starts[i].

    Meaning: reference.indexing.indexer_logits. Other columns keep what they hold. Queries may
    stand in any order, but those of one request side by side cost least. A score's bits depend on
    its query and key alone, so equal keys have equal scores. Hopper adds FP8 products with about
    14 bits, an error of some 3e-4 of a row's largest score.
    """
    _check(query, weights, keys, key_scales, logits)
    num_queries, heads, _ = query.shape
    for name, bounds in (("starts", starts), ("ends", ends)):
        if bounds.dtype != torch.int32 or bounds.shape != (num_queries,):
            raise ValueError(f"{name} are int32, one a query")
    num_columns = logits.shape[1]
    if not num_queries or not len(keys) or not num_columns:
        return
    grid = (triton.cdiv(num_queries, _QUERIES), triton.cdiv(num_columns, _RUN_COLUMNS))
    _score[grid](
        query,
        TensorDescriptor.from_tensor(keys, [_TILE_KEYS, _DIM], _KEY_LAYOUT),
        key_scales,
        weights,
        starts,
        ends,
        logits,
        num_queries,
        num_columns,
        logits.stride(0),
        HEADS=heads,
        TILE=_TILE_KEYS,
        STAGES=_STAGES,
        num_warps=4,
        maxnreg=96,  # of 640 threads; the groups that score get 112 and more of them
    )


def _check(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    num_queries, heads, dim = query.shape
    if dim != _DIM or heads not in (16, 32):
        raise ValueError(f"{heads} index heads of {dim}; known are 16 or 32 of {_DIM}")
    if query.dtype != torch.float8_e4m3fn or keys.dtype != torch.float8_e4m3fn:
        raise ValueError(f"queries and keys are e4m3, not {query.dtype} and {keys.dtype}")
    if keys.shape[1] != _DIM or not keys.is_contiguous() or not query.is_contiguous():
        raise ValueError("queries and keys must be contiguous, keys [num_keys, 128]")
    if weights.dtype != torch.float32 or weights.shape != (num_queries, heads):
        raise ValueError(f"weights are fp32 of shape {(num_queries, heads)}")
    if key_scales.dtype != torch.float32 or key_scales.shape != keys.shape[:1]:
        raise ValueError("key scales are fp32, one a key")
    if not weights.is_contiguous() or not key_scales.is_contiguous():
        raise ValueError("weights and key scales must be contiguous")
    if logits.dtype != torch.float32 or logits.shape[0] != num_queries or logits.stride(1) != 1:
        raise ValueError(f"logits are {num_queries} rows of adjacent fp32 columns")


@gluon.jit
def _head_row(query, place, HEADS: gl.constexpr):
    """Row of [num_queries, HEADS] that the N side's `place` holds, for four queries from `query`.

    Lane l of four has accumulators 8 j + 2 l and 8 j + 2 l + 1 of its key: heads of query l.
    """
    return (query + place // 2 % 4) * HEADS + (place // 8 * 2 + place % 2)


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _score(
    query,  # [num_queries, HEADS, 128] e4m3
    keys,  # descriptor of [num_keys, 128] e4m3
    key_scales,  # [num_keys] fp32
    weights,  # [num_queries, HEADS] fp32
    starts,  # [num_queries] int32
    ends,  # [num_queries] int32
    logits,  # [num_queries, num_columns] fp32, rows row_stride apart
    num_queries,
    num_columns,
    row_stride,
    HEADS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    q_tiles = gl.allocate_shared_memory(gl.float8e4nv, [4, 4 * HEADS, 128], KEYS)
    k_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, 128], KEYS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=4)

    block = gl.program_id(0) * 16
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    place = gl.arange(0, 4 * HEADS, gl.SliceLayout(1, ROWS))
    dim = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ROWS)), 0)
    for part in gl.static_range(4):
        row = gl.expand_dims(_head_row(block + part * 4, place, HEADS), 1)
        q = gl.load(query + row.to(gl.int64) * 128 + dim, mask=row < num_queries * HEADS, other=0.0)
        q_tiles.index(part).store(q)
    fence_async_shared()

    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    one = block + gl.arange(0, 16, LANES)
    start = gl.load(starts + one, mask=one < num_queries, other=0)
    end = gl.load(ends + one, mask=one < num_queries, other=0)
    first = gl.min(gl.where(start < end, start, 2147483647), 0)
    last = gl.max(gl.where(start < end, end, 0), 0)
    # The blocks of these queries share their keys evenly, in whole tiles.
    run = gl.cdiv(gl.cdiv(last - first, TILE), gl.num_programs(1)) * TILE
    first += gl.program_id(1) * run
    last = gl.minimum(first + run, last)
    args = (q_tiles, k_tiles, full, free, key_scales, weights, starts, ends, logits)
    sizes = (num_queries, num_columns, row_stride, block, first, last)
    gl.warp_specialize(
        [
            (_score_part, (0, args, sizes, HEADS, TILE, STAGES)),
            (_score_part, (1, args, sizes, HEADS, TILE, STAGES)),
            (_score_part, (2, args, sizes, HEADS, TILE, STAGES)),
            (_score_part, (3, args, sizes, HEADS, TILE, STAGES)),
            (_bring_keys, (keys, k_tiles, full, free, first, last, TILE, STAGES)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )


@gluon.jit
def _bring_keys(keys, k_tiles, full, free, first, last, TILE: gl.constexpr, STAGES: gl.constexpr):
    stage = 0
    parity = 1
    for at in range(first, last, TILE):
        mbarrier.wait(free.index(stage), parity)
        mbarrier.expect(full.index(stage), TILE * 128)
        tma.async_copy_global_to_shared(keys, [at, 0], full.index(stage), k_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1


@gluon.jit
def _score_part(
    PART: gl.constexpr,
    args,
    sizes,
    HEADS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_tiles, k_tiles, full, free, key_scales, weights, starts, ends, logits = args
    num_queries, num_columns, row_stride, block, first, last = sizes
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 4 * HEADS, 32])
    # Of the accumulators' layout, what is left once each thread has added its heads.
    OUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [TILE, 4]
    )
    head_row = _head_row(block + PART * 4, gl.arange(0, 4 * HEADS, gl.SliceLayout(0, ACC)), HEADS)
    weight = gl.load(weights + head_row, mask=head_row < num_queries * HEADS, other=0.0)
    weight = gl.expand_dims(weight, 0)
    one = block + PART * 4 + gl.arange(0, 4, gl.SliceLayout(0, OUT))
    start = gl.load(starts + one, mask=one < num_queries, other=0)
    end = gl.load(ends + one, mask=one < num_queries, other=0)
    out = gl.expand_dims(logits + (one.to(gl.int64) * row_stride - start), 0)
    end = gl.expand_dims(gl.minimum(end - start, num_columns) + start, 0)
    start = gl.expand_dims(start, 0)
    slot = gl.arange(0, TILE, gl.SliceLayout(1, OUT))
    q = q_tiles.index(PART).permute((1, 0))
    acc = gl.zeros([TILE, 4 * HEADS], gl.float32, ACC)
    stage = 0
    parity = 0
    for at in range(first, last, TILE):
        key = at + slot
        scale = gl.load(key_scales + key, mask=key < last, other=0.0)
        mbarrier.wait(full.index(stage), parity)
        acc = warpgroup_mma(k_tiles.index(stage), q, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(stage), count=1)
        heads = gl.reshape(gl.maximum(acc, 0.0) * weight, [TILE, HEADS // 2, 4, 2])
        heads = gl.reshape(gl.permute(heads, [0, 2, 1, 3]), [TILE, 4, HEADS])
        score = gl.convert_layout(gl.reduce(heads, 2, _add), OUT, assert_trivial=True)
        key = gl.expand_dims(key, 1)
        gl.store(out + key, score * gl.expand_dims(scale, 1), mask=(key >= start) & (key < end))
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1
