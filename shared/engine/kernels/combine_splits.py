"""Merges attention over parts of a query's rows into attention over all of them.

One program a query and head. Parts are added in one order that depends on their number alone, so
a query's bits are a function of its own parts.
"""

import torch
import triton
import triton.language as tl

_VALUE_DIM = tl.constexpr(512)
_MAX_SPLITS = 64  # what one program holds in registers


def combine_splits(
    outputs: torch.Tensor,  # [num_queries, num_splits, num_heads, 512] fp32
    lses: torch.Tensor,  # [num_queries, num_splits, num_heads] fp32, natural logarithms
    out: torch.Tensor,  # [num_queries, num_heads, 512] bf16, written
    lse: torch.Tensor,  # [num_queries, num_heads] fp32, written
) -> None:
    """Meaning: reference.sparse_decode.combine_splits.

    A part whose logarithm is -inf holds no rows: its output is not read. A query without rows gets
    zeros and -inf. A part that is no number makes none of its query and head.
    """
    _check(outputs, lses, out, lse)
    num_queries, num_splits, num_heads = lses.shape
    if num_queries:
        _combine_splits[(num_queries * num_heads,)](
            outputs,
            lses,
            out,
            lse,
            num_splits,
            num_heads,
            TILE_SPLITS=triton.next_power_of_2(num_splits),
            num_warps=4,
        )


def _check(outputs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    num_queries, num_splits, num_heads = lses.shape
    if not 1 <= num_splits <= _MAX_SPLITS:
        raise ValueError(f"{num_splits} splits, between 1 and {_MAX_SPLITS} can be combined")
    shapes = {
        "outputs": (outputs, (*lses.shape, _VALUE_DIM.value), torch.float32),
        "lses": (lses, tuple(lses.shape), torch.float32),
        "out": (out, (num_queries, num_heads, _VALUE_DIM.value), torch.bfloat16),
        "lse": (lse, (num_queries, num_heads), torch.float32),
    }
    for name, (tensor, shape, dtype) in shapes.items():
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} of the shape {shape}")


@triton.jit
def _combine_splits(
    outputs,  # [num_queries, num_splits, num_heads, 512]
    lses,  # [num_queries, num_splits, num_heads]
    out,  # [num_queries, num_heads, 512]
    lse,  # [num_queries, num_heads]
    num_splits,
    num_heads,
    TILE_SPLITS: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, TILE_SPLITS)
    column = tl.arange(0, _VALUE_DIM)
    row = (item // num_heads * num_splits + split) * num_heads + item % num_heads
    part = tl.load(lses + row, mask=split < num_splits, other=-float("inf"))
    top = tl.max(part, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp(part - top)
    total = tl.sum(weight, 0)
    weight = tl.where(total == 0, 0.0, weight / total)
    places = outputs + row[:, None] * _VALUE_DIM + column[None, :]
    values = tl.load(places, mask=(weight > 0)[:, None], other=0.0)
    tl.store(
        out + item * _VALUE_DIM + column,
        tl.sum(values * weight[:, None], 0).to(tl.bfloat16),
    )
    tl.store(lse + item, tl.where(total == 0, -float("inf"), top + tl.log(total)))
