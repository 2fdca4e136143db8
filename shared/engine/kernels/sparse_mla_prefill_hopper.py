"""Sparse MLA prefill with 64 heads on Hopper: three warpgroups a multiprocessor, one query a turn.

One warpgroup gathers rows in blocks of 64 into two buffers. The other two hold half of the output's
columns each and take turns: one scores even blocks, one odd ones, so that the softmax of one runs
beside the matrix products of the other. Each then adds both kinds of block to its own half, in
order. The seesaw is FlashMLA's idea (github.com/deepseek-ai/FlashMLA, its sm90 sparse prefill).
"""

import torch
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

from shared.engine.kernels.sparse_mla_prefill_gather import (
    FREE,
    NUM_BARRIERS,
    PUBLISHED,
    QUERY_FREE,
    QUERY_READY,
    READY,
    SUMMED,
    gather,
    initialise,
)

HEADS = 64
VALUE_DIM = 512
LATENT_DIM = 576

# Registers a thread. Three warpgroups enter with 168 each; the first is left with what the other
# two do not take, 224. With more for these the assembler spills.
_ENTRY_REGISTERS = 168
_ODD_REGISTERS = gl.constexpr(208)
_GATHER_REGISTERS = gl.constexpr(72)
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def launch(
    query: torch.Tensor,  # [num_queries > 0, 64, 576] bf16 contiguous
    rows: torch.Tensor,  # [num_rows, 576] bf16 contiguous
    chosen: torch.Tensor,  # [num_queries, topk > 0] int32 contiguous, -1 = none
    scale: float,
    out: torch.Tensor,  # [num_queries, 64, 512] bf16, written
    lse: torch.Tensor,  # [num_queries, 64] fp32, written
) -> None:
    """What `sparse_mla_prefill` does, which also checks. Starts the kernel and returns."""
    num_queries, topk = chosen.shape
    if num_queries * HEADS >= 2**31:  # coordinates of tensor copies are 32-bit
        raise ValueError(f"{num_queries} queries, not below {2**31 // HEADS}")
    heads, outputs = query.view(-1, LATENT_DIM), out.view(-1, VALUE_DIM)
    properties = torch.cuda.get_device_properties(query.device)
    _attend[(min(num_queries, properties.multi_processor_count),)](
        TensorDescriptor.from_tensor(heads, [HEADS, 256], _TILE),
        TensorDescriptor.from_tensor(heads, [HEADS, 64], _TILE),
        rows,
        chosen,
        TensorDescriptor.from_tensor(outputs, [HEADS, 256], _TILE),
        lse,
        num_queries,
        topk,
        scale * 1.4426950408889634,  # exponentials are of base 2
        num_warps=4,
        maxnreg=_ENTRY_REGISTERS,
    )


# Finite, so that a block without rows gives no NaN.
_LOWEST = gl.constexpr(-1e30)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_OUTPUT.value, k_width=2))
_BY_HEAD = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_BY_PLACE = gl.constexpr(gl.SliceLayout(0, _SCORES.value))
_OUTPUT_BY_HEAD = gl.constexpr(gl.SliceLayout(1, _OUTPUT.value))


@gluon.jit(do_not_specialize=["num_queries"])
def _attend(
    query_wide,  # tiles [64, 256] of [num_queries * 64, 576] bf16
    query_narrow,  # tiles [64, 64] of the same
    rows,  # [num_rows, 576] bf16
    chosen,  # [num_queries, topk] int32
    out,  # tiles [64, 256] of [num_queries * 64, 512] bf16
    lse,  # [num_queries, 64] fp32
    num_queries,
    topk,
    scale,
):
    tile: gl.constexpr = query_wide.layout
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], tile)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], tile)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile)
    k_left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], tile)
    k_right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], tile)
    # Once a block is scored its probabilities take the place of its rotary part.
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    tops = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    initialise(bars)
    q = (q_left, q_right, q_rope)
    k = (k_left, k_right, k_rope)
    pairs = (topk + 127) // 128
    attend_arguments = (q, k, tops, sums, bars, chosen, out, lse, num_queries, topk, pairs, scale)
    queries = (query_wide, query_narrow)
    gather_arguments = (q, k, bars, queries, rows, chosen, num_queries, topk, pairs)
    gl.warp_specialize(
        [(_even, attend_arguments), (_odd, attend_arguments), (gather, gather_arguments)],
        [4, 4],
        [_ODD_REGISTERS, _GATHER_REGISTERS],
    )


@gluon.jit
def _even(q, k, tops, sums, bars, chosen, out, lse, num_queries, topk, pairs, scale):
    """Scores even blocks and owns the left half of the output."""
    phase = 0
    turn = 0
    for number in range(gl.program_id(0), num_queries, gl.num_programs(0)):
        ids = chosen + gl.cast(number, gl.int64) * topk
        top = gl.full([64], _LOWEST, gl.float32, _BY_HEAD)
        total = gl.zeros([64], gl.float32, _BY_HEAD)
        acc = gl.zeros([64, 256], gl.float32, _OUTPUT)
        mbarrier.wait(bars.index(QUERY_READY), turn)
        for i in range(pairs):
            is_last = i == pairs - 1
            b0 = _zero(i, topk)
            b1 = b0 + 1
            s = _scores((q[0], q[1], q[2]), (k[0], k[1], k[2]), b0, 0, bars, phase)
            bias = _bias(ids, i * 128, topk)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(bars.index(QUERY_FREE), count=1, pred=is_last)
            logits, best = _logits(s, bias, scale)
            weights, p, new = _publish(logits, best, top, k[2].index(b0), tops, bars, 0)
            fade = gl.exp2(top - new)
            acc = _fade(acc, fade)
            acc = warpgroup_mma(gl.convert_layout(p, _WEIGHTS), k[0].index(b0), acc, is_async=True)
            total = total * fade + gl.sum(weights, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(bars.index(FREE), count=1)
            # The odd block, which the other warpgroup scored.
            mbarrier.wait(bars.index(PUBLISHED + 1), phase)
            top = tops.index(1).load(_BY_HEAD)
            fade = gl.exp2(new - top)
            acc = warpgroup_mma(k[2].index(b1), k[0].index(b1), _fade(acc, fade), is_async=True)
            total = total * fade
            sums.index(0).store(total)
            mbarrier.arrive(bars.index(SUMMED), count=1, pred=is_last)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(bars.index(FREE + 2), count=1, pred=i < pairs - 1)
            phase ^= 1
        _leave(acc, total, top, k[0], 0, sums, bars, turn, topk, out, lse, number)
        turn ^= 1


@gluon.jit
def _odd(q, k, tops, sums, bars, chosen, out, lse, num_queries, topk, pairs, scale):
    """Scores odd blocks and owns the right half of the output."""
    phase = 0
    turn = 0
    for number in range(gl.program_id(0), num_queries, gl.num_programs(0)):
        ids = chosen + gl.cast(number, gl.int64) * topk
        top = gl.full([64], _LOWEST, gl.float32, _BY_HEAD)
        total = gl.zeros([64], gl.float32, _BY_HEAD)
        acc = gl.zeros([64, 256], gl.float32, _OUTPUT)
        mbarrier.wait(bars.index(QUERY_READY), turn)
        for i in range(pairs):
            is_last = i == pairs - 1
            b0 = _zero(i, topk)
            b1 = b0 + 1
            s = _scores((q[1], q[0], q[2]), (k[1], k[0], k[2]), b0, 1, bars, phase)
            bias = _bias(ids, i * 128 + 64, topk)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(bars.index(QUERY_FREE), count=1, pred=is_last)
            logits, best = _logits(s, bias, scale)
            # The even block, which the other warpgroup scored; its product runs behind the softmax.
            mbarrier.wait(bars.index(PUBLISHED), phase)
            new = tops.index(0).load(_BY_HEAD)
            fade = gl.exp2(top - new)
            total = total * fade
            acc = warpgroup_mma(k[2].index(b0), k[1].index(b0), _fade(acc, fade), is_async=True)
            weights, p, top = _publish(logits, best, new, k[2].index(b1), tops, bars, 1)
            fade = gl.exp2(new - top)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(bars.index(FREE + 1), count=1)
            acc = _fade(acc, fade)
            acc = warpgroup_mma(gl.convert_layout(p, _WEIGHTS), k[1].index(b1), acc, is_async=True)
            total = total * fade + gl.sum(weights, 1)
            sums.index(1).store(total)
            mbarrier.arrive(bars.index(SUMMED + 1), count=1, pred=is_last)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(bars.index(FREE + 3), count=1, pred=i < pairs - 1)
            phase ^= 1
        _leave(acc, total, top, k[1], 1, sums, bars, turn, topk, out, lse, number)
        turn ^= 1


@gluon.jit
def _zero(counter, topk):
    """Zero, unknown to the compiler: else it computes every matrix descriptor before the loop and
    keeps them all, which spills registers.
    """
    return counter & (topk >> 30)


@gluon.jit
def _scores(q, k, zero, block: gl.constexpr, bars, phase):
    """Starts the products of 64 heads and 64 rows, in the order in which the rows' parts arrive."""
    ready: gl.constexpr = READY + 4 * block
    s = gl.zeros([64, 64], gl.float32, _SCORES)
    number = zero + block
    mbarrier.wait(bars.index(ready), phase)
    part = k[0].index(number).permute((1, 0))
    s = warpgroup_mma(q[0].index(zero), part, s, use_acc=False, is_async=True)
    query, half = q[1].index(zero), k[1].index(number)
    for quarter in gl.static_range(2):
        mbarrier.wait(bars.index(ready + 1 + quarter), phase)
        part = half.slice(128 * quarter, 128, dim=1).permute((1, 0))
        s = warpgroup_mma(query.slice(128 * quarter, 128, dim=1), part, s, is_async=True)
    mbarrier.wait(bars.index(ready + 3), phase)
    part = k[2].index(number).permute((1, 0))
    return warpgroup_mma(q[2].index(zero), part, s, is_async=True)


@gluon.jit
def _bias(ids, begin, topk):
    place = begin + gl.arange(0, 64, _BY_PLACE)
    row = gl.load(ids + place, mask=place < topk, other=-1)
    return gl.where(row >= 0, 0.0, float("-inf"))


@gluon.jit
def _logits(s, bias, scale):
    logits = s * scale + gl.expand_dims(bias, 0)
    return logits, gl.max(logits, 1)


@gluon.jit
def _publish(logits, best, top, tile, tops, bars, block: gl.constexpr):
    """Gives the block's probabilities and running maximum to the other warpgroup."""
    new = gl.maximum(top, best)
    weights = gl.exp2(logits - gl.expand_dims(new, 1))
    p = weights.to(gl.bfloat16)
    tile.store(p)
    tops.index(block).store(new)
    fence_async_shared()
    mbarrier.arrive(bars.index(PUBLISHED + block), count=1)
    # Read back, so that the own product, which needs it, is not moved before the publication: the
    # other warpgroup waits for that.
    return weights, p, tops.index(block).load(_BY_HEAD)


@gluon.jit
def _fade(acc, factor):
    return acc * gl.expand_dims(gl.convert_layout(factor, _OUTPUT_BY_HEAD), 1)


@gluon.jit
def _leave(acc, total, top, k, half: gl.constexpr, sums, bars, turn, topk, out, lse, number):
    """Writes half of a query's output; it passes through the last block's buffer."""
    mbarrier.wait(bars.index(SUMMED + 1 - half), turn)
    total = total + sums.index(1 - half).load(_BY_HEAD)
    stage = k.index(_zero(turn, topk) + 1)
    share = gl.where(total > 0, 1.0 / total, 0.0)
    stage.store(_fade(acc, share).to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [number * 64, half * 256], stage)
    if half == 0:
        head = gl.arange(0, 64, _BY_HEAD)
        logarithm = (top + gl.log2(total)) * 0.6931471805599453
        gl.store(lse + gl.cast(number, gl.int64) * 64 + head, logarithm)
    tma.store_wait(0)
    mbarrier.arrive(bars.index(FREE + 2 + half), count=1)
