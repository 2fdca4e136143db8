"""Scores of a decode batch's cached index keys, read from pages in any order.

Bound by memory: a program walks some consecutive pages of one request, so many pages are on their
way at once. Every query's heads are added in one order whatever else is in the batch.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.engine.kv.layout import BLOCK_TOKENS

_DIM = 128
_PAGE_BYTES = BLOCK_TOKENS * (_DIM + 4)
_MAX_TOKENS = 4
_MAX_PAGES_A_PROGRAM = 64
_PROGRAMS = 8 * 132  # enough to fill the processors of an H200 twice over
# Half of the stages hold pages, the others page numbers still to be looked up.
_STAGES = 10


def paged_indexer(
    query: torch.Tensor,  # [num_requests, num_tokens, heads, 128] e4m3, 1 to 4 tokens
    weights: torch.Tensor,  # [num_requests, num_tokens, heads] fp32, the query's scale included
    pages: torch.Tensor,  # [num_pages, 64 * 132] uint8: 64 e4m3 keys, then their fp32 scales
    page_table: torch.Tensor,  # [num_requests, max_pages] int32
    limits: torch.Tensor,  # [num_requests, num_tokens] int32: keys a query may see
    logits: torch.Tensor,  # [num_requests, num_tokens, num_columns] fp32, written in place
) -> None:
    """Column j of a query's row becomes the score of its request's key j, for j below its limit.

    Meaning: reference.indexing.paged_indexer. Columns from the limit on keep what they hold; a
    query with limit 0 is padding. The page table must cover the limits. A score's
    bits depend on its query and key alone.
    """
    _check(query, weights, pages, page_table, limits, logits)
    num_requests, num_tokens, heads, _ = query.shape
    max_pages = page_table.shape[1]
    if not num_requests or not max_pages:
        return
    wanted = triton.cdiv(num_requests * max_pages, _PROGRAMS)
    pages_a_program = min(max(wanted, 1), _MAX_PAGES_A_PROGRAM)
    values = pages.view(torch.float8_e4m3fn).as_strided(
        (len(pages), BLOCK_TOKENS, _DIM), (pages.stride(0), _DIM, 1)
    )
    grid = (num_requests, triton.cdiv(max_pages, pages_a_program))
    _score_pages[grid](
        query,
        TensorDescriptor.from_tensor(values, [1, BLOCK_TOKENS, _DIM]),
        pages[:, BLOCK_TOKENS * _DIM :].view(torch.float32),
        page_table,
        limits,
        weights,
        logits,
        num_tokens,
        page_table.stride(0),
        pages.stride(0) // 4,
        logits.shape[2],
        pages_a_program,
        HEADS=heads,
        TOKENS=triton.next_power_of_2(num_tokens),
        STAGES=_STAGES,
        num_warps=4,
    )


def _check(
    query: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    limits: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    num_tokens, heads, dim = query.shape[1:]
    if dim != _DIM or heads not in (16, 32):
        raise ValueError(f"{heads} index heads of {dim}; known are 16 or 32 of {_DIM}")
    if not 1 <= num_tokens <= _MAX_TOKENS:
        raise ValueError(f"{num_tokens} query tokens a request, at most {_MAX_TOKENS}")
    if pages.shape[1] != _PAGE_BYTES or pages.stride(1) != 1 or pages.stride(0) % 16:
        raise ValueError(f"pages are {_PAGE_BYTES} adjacent bytes, a multiple of 16 apart")
    if page_table.shape[0] != len(query) or page_table.stride(1) != 1:
        raise ValueError(f"the page table has {len(query)} rows of adjacent page numbers")
    if logits.shape[:-1] != query.shape[:2]:
        raise ValueError(f"logits have shape {tuple(query.shape[:2])} x columns")
    for name, part, dtype, shape in (
        ("query", query, torch.float8_e4m3fn, query.shape),
        ("weights", weights, torch.float32, query.shape[:3]),
        ("limits", limits, torch.int32, query.shape[:2]),
        ("logits", logits, torch.float32, logits.shape),
    ):
        if part.dtype != dtype or part.shape != shape or not part.is_contiguous():
            raise ValueError(f"{name}: a contiguous {dtype} tensor of shape {tuple(shape)}")
    if pages.dtype != torch.uint8 or page_table.dtype != torch.int32:
        raise ValueError(f"pages are uint8, not {pages.dtype}; page numbers int32")


@triton.jit
def _score_pages(
    query,  # [num_requests * num_tokens * HEADS, 128] e4m3
    values,  # descriptor of [num_pages, 64, 128] e4m3
    scales,  # [num_pages, 64] fp32, rows scales_stride apart
    page_table,  # [num_requests, ...] int32, rows table_stride apart
    limits,  # [num_requests, num_tokens] int32
    weights,  # [num_requests * num_tokens * HEADS] fp32
    logits,  # [num_requests * num_tokens, num_columns] fp32
    num_tokens,
    table_stride,
    scales_stride,
    num_columns,
    pages_a_program,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, TOKENS)
    limit = tl.load(limits + request * num_tokens + token, mask=token < num_tokens, other=0)
    limit = tl.minimum(limit, num_columns)
    num_pages = (tl.max(limit) + 63) // 64
    first = tl.program_id(1) * pages_a_program
    if first >= num_pages:
        return
    head = tl.arange(0, TOKENS * HEADS)
    is_head = head < num_tokens * HEADS
    head_row = request * (num_tokens * HEADS) + head
    dim = tl.arange(0, 128)
    q = tl.load(query + head_row[:, None] * 128 + dim[None, :], mask=is_head[:, None], other=0.0)
    weight = tl.load(weights + head_row, mask=is_head, other=0.0)
    table = page_table + request * table_stride
    out = logits + (request * num_tokens + token) * num_columns
    slot = tl.arange(0, 64)
    for number in tl.range(
        first, tl.minimum(first + pages_a_program, num_pages), num_stages=STAGES
    ):
        page = tl.load(table + number)
        keys = values.load([page, 0, 0]).reshape(64, 128)
        scale = tl.load(scales + page.to(tl.int64) * scales_stride + slot)
        per_head = tl.maximum(tl.dot(keys, q.T), 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(per_head, [64, TOKENS, HEADS]), 2) * scale[:, None]
        column = number * 64 + slot
        tl.store(out[None, :] + column[:, None], score, mask=column[:, None] < limit[None, :])
