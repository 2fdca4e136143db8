"""Sparse MLA for many queries at once: each attends to its own chosen rows of bf16 latents.

Knows rows by number only; pages, formats and requests are the caller's. 64 heads run on Hopper in
a kernel of their own (`sparse_mla_prefill_hopper`); the one here takes any head count.
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.sparse_mla_prefill_hopper import HEADS as HOPPER_HEADS
from shared.engine.kernels.sparse_mla_prefill_hopper import LATENT_DIM, VALUE_DIM, launch

_ROPE_DIM = LATENT_DIM - VALUE_DIM
_HEADS = (8, 16, 32, 64)
_FEWEST_HEADS = 16  # rows of the smallest matrix instruction: fewer heads are padded
_BLOCK_ROWS = 64
_HOPPER = (9, 0)


def sparse_mla_prefill(
    query: torch.Tensor,  # [num_queries, heads, 576] bf16 contiguous, heads 8, 16, 32 or 64
    rows: torch.Tensor,  # [num_rows, 576] bf16 contiguous, 512 latent then 64 rotary elements
    chosen: torch.Tensor,  # [num_queries, topk] int32 contiguous, row numbers, -1 = none
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [num_queries, heads, 512] bf16, [num_queries, heads] fp32
    """Softmax attention of every query over its rows, and the natural logarithm of each sum.

    A row's first 512 elements are its value. -1 may stand anywhere; a query without rows gets zeros
    and -inf. Row numbers are not checked. A query's bits depend on its own places alone, not on the
    other queries. Meaning: reference.sparse_prefill.sparse_mla_prefill.
    """
    _check(query, rows, chosen)
    num_queries, heads, _ = query.shape
    topk = chosen.shape[1]
    if not topk:
        return (
            query.new_zeros((num_queries, heads, VALUE_DIM)),
            query.new_full((num_queries, heads), -torch.inf, dtype=torch.float32),
        )
    out = query.new_empty((num_queries, heads, VALUE_DIM))
    lse = query.new_empty((num_queries, heads), dtype=torch.float32)
    if not num_queries:
        return out, lse
    if _is_hopper(query.device) and heads == HOPPER_HEADS:
        launch(query, rows, chosen, scale, out, lse)
        return out, lse
    padded_heads = max(heads, _FEWEST_HEADS)
    _attend[(num_queries,)](
        query,
        rows,
        chosen,
        out,
        lse,
        scale,
        topk,
        HEADS=heads,
        PADDED_HEADS=padded_heads,
        VALUE=VALUE_DIM,
        ROPE=_ROPE_DIM,
        BLOCK=_BLOCK_ROWS,
        IN_FP32=not query.is_cuda,
        num_warps=8 if padded_heads > _FEWEST_HEADS else 4,
        num_stages=2,
    )
    return out, lse


def _check(query: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> None:
    if query.dim() != 3 or query.shape[2] != LATENT_DIM or query.dtype != torch.bfloat16:
        raise ValueError(f"query is {query.dtype} {tuple(query.shape)}, not bf16 [n, heads, 576]")
    if query.shape[1] not in _HEADS:
        raise ValueError(f"{query.shape[1]} heads, not one of {_HEADS}")
    if rows.dim() != 2 or rows.shape[1] != LATENT_DIM or rows.dtype != torch.bfloat16:
        raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, not bf16 [n, 576]")
    if chosen.dim() != 2 or chosen.shape[0] != len(query) or chosen.dtype != torch.int32:
        raise ValueError(
            f"chosen is {chosen.dtype} {tuple(chosen.shape)}, not int32 [{len(query)}, topk]"
        )
    if not (query.is_contiguous() and rows.is_contiguous() and chosen.is_contiguous()):
        raise ValueError("query, rows and chosen must be contiguous")
    if not query.device == rows.device == chosen.device:
        raise ValueError(f"tensors lie on {query.device}, {rows.device} and {chosen.device}")


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


@triton.jit
def _attend(
    query,  # [num_queries, HEADS, VALUE + ROPE] bf16
    rows,  # [num_rows, VALUE + ROPE] bf16
    chosen,  # [num_queries, topk] int32
    out,  # [num_queries, HEADS, VALUE] bf16
    lse,  # [num_queries, HEADS] fp32
    scale,
    topk,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_FP32: tl.constexpr,  # the interpreter cannot multiply bf16 matrices
):
    LATENT: tl.constexpr = VALUE + ROPE
    number = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)
    value = tl.arange(0, VALUE)
    rope = VALUE + tl.arange(0, ROPE)
    is_head = head[:, None] < HEADS
    own = query + number * HEADS * LATENT + head[:, None] * LATENT
    q_value = tl.load(own + value[None, :], mask=is_head, other=0.0)
    q_rope = tl.load(own + rope[None, :], mask=is_head, other=0.0)
    if IN_FP32:
        q_value = q_value.to(tl.float32)
        q_rope = q_rope.to(tl.float32)
    # Scores are in units of ln 2. The floor is finite so that a block without rows gives no NaN.
    scale_log2 = scale * 1.4426950408889634
    top = tl.full([PADDED_HEADS], -1e30, tl.float32)
    total = tl.zeros([PADDED_HEADS], tl.float32)
    acc = tl.zeros([PADDED_HEADS, VALUE], tl.float32)
    for begin in tl.range(0, topk, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        row = tl.load(chosen + number * topk + place, mask=place < topk, other=-1)
        is_row = row >= 0
        base = rows + row.to(tl.int64)[:, None] * LATENT
        # Rows that are not there count as zeros: what lies elsewhere may be NaN.
        k_value = tl.load(base + value[None, :], mask=is_row[:, None], other=0.0)
        k_rope = tl.load(base + rope[None, :], mask=is_row[:, None], other=0.0)
        if IN_FP32:
            k_value = k_value.to(tl.float32)
            k_rope = k_rope.to(tl.float32)
        scores = tl.dot(q_value, tl.trans(k_value))
        scores = tl.dot(q_rope, tl.trans(k_rope), scores)
        scores = tl.where(is_row[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(k_value.dtype), k_value, acc * fade[:, None])
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    target = out + number * HEADS * VALUE + head[:, None] * VALUE + value[None, :]
    tl.store(target, (acc / divisor[:, None]).to(tl.bfloat16), mask=is_head)
    logarithm = (top + tl.log2(divisor)) * 0.6931471805599453
    logarithm = tl.where(total > 0, logarithm, float("-inf"))
    tl.store(lse + number * HEADS + head, logarithm, mask=head < HEADS)
