"""Turns fp8_ds_mla rows into bf16 rows, the scratch that prefill's attention reads.

Powers of two scale the values (`shared.engine.kv.format`), so that nothing is rounded. The rows'
pages may be one layer's view of a block-major pool.
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.rows import PAGE_ROWS, check_row_pages

_LATENT = 576
_TILE_ROWS = 8  # 9 KiB of output a program


def dequantise_rows(
    pages: torch.Tensor,  # [num_pages, 64, 656] uint8
    row_ids: torch.Tensor,  # [n] int32 or int64 page * 64 + offset, negative = skipped
    out: torch.Tensor,  # [n, 576] bf16, written in place
) -> None:
    """Write row row_ids[i] to out[i]. Meaning: reference.kv_rows.dequantise_rows.

    A skipped row of out keeps its content.
    """
    _check(pages, out)
    if row_ids.dtype not in (torch.int32, torch.int64) or row_ids.shape != (len(out),):
        raise ValueError(f"row_ids must be {len(out)} int32 or int64 numbers")
    if not row_ids.is_contiguous():
        raise ValueError("row_ids must be contiguous")
    if len(out):
        _dequantise_list[(triton.cdiv(len(out), _TILE_ROWS),)](
            *_views(pages), row_ids, out, len(out), TILE_ROWS=_TILE_ROWS, num_warps=4
        )


def dequantise_range(
    pages: torch.Tensor,  # [num_pages, 64, 656] uint8
    first_row: int,  # page * 64 + offset
    out: torch.Tensor,  # [n, 576] bf16, written in place
) -> None:
    """Write rows first_row.. to out. Meaning: reference.kv_rows.dequantise_rows of that range."""
    _check(pages, out)
    if first_row < 0 or first_row + len(out) > len(pages) * PAGE_ROWS:
        raise ValueError(f"no rows {first_row}..{first_row + len(out)} in {len(pages)} pages")
    if len(out):
        _dequantise_range[(triton.cdiv(len(out), _TILE_ROWS),)](
            *_views(pages), first_row, out, len(out), TILE_ROWS=_TILE_ROWS, num_warps=4
        )


def _check(pages: torch.Tensor, out: torch.Tensor) -> None:
    check_row_pages(pages)
    if out.dtype != torch.bfloat16 or out.shape[1:] != (_LATENT,) or not out.is_contiguous():
        raise ValueError(f"out must be [n, {_LATENT}] bf16, contiguous")


def _views(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    return pages, pages.view(torch.float32), pages.view(torch.bfloat16), pages.stride(0)


@triton.jit
def _dequantise_list(
    codes,  # the pages as bytes
    scales,  # the same as fp32
    ropes,  # the same as bf16
    page_bytes,  # from one page to the next
    row_ids,  # [n]
    out,  # [n, 576]
    num_rows,
    TILE_ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE_ROWS
    group = first * 4 + tl.arange(0, TILE_ROWS * 4)
    row = tl.load(row_ids + group // 4, mask=group // 4 < num_rows, other=-1)
    _latent_part(codes, scales, page_bytes, row.to(tl.int64), group, out)
    at = first + tl.arange(0, TILE_ROWS)
    row = tl.load(row_ids + at, mask=at < num_rows, other=-1)
    _rotary_part(ropes, page_bytes, row.to(tl.int64), at, out)


@triton.jit
def _dequantise_range(
    codes,
    scales,
    ropes,
    page_bytes,
    first_row,
    out,  # [n, 576]
    num_rows,
    TILE_ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE_ROWS
    group = first * 4 + tl.arange(0, TILE_ROWS * 4)
    row = tl.where(group // 4 < num_rows, first_row + group // 4, -1)
    _latent_part(codes, scales, page_bytes, row, group, out)
    at = first + tl.arange(0, TILE_ROWS)
    row = tl.where(at < num_rows, first_row + at, -1)
    _rotary_part(ropes, page_bytes, row, at, out)


@triton.jit
def _latent_part(
    codes,
    scales,
    page_bytes,
    row,  # [4 * rows] int64, each row four times, negative = skipped
    group,  # [4 * rows] int64: place in out, counted in groups of 128 values
    out,
):
    live = row >= 0
    start = (row >> 6) * page_bytes + (row & 63) * 656
    column = tl.arange(0, 128)[None, :]
    part = group % 4
    code = tl.load(codes + (start + part * 128)[:, None] + column, mask=live[:, None], other=0)
    scale = tl.load(scales + start // 4 + 128 + part, mask=live, other=0.0)
    values = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    to = (group // 4) * 576 + part * 128
    tl.store(out + to[:, None] + column, values.to(tl.bfloat16), mask=live[:, None])


@triton.jit
def _rotary_part(
    ropes,
    page_bytes,
    row,  # [rows] int64, negative = skipped
    at,  # [rows] int64: place in out
    out,
):
    live = (row >= 0)[:, None]
    start = (row >> 6) * (page_bytes // 2) + (row & 63) * 328 + 264
    column = tl.arange(0, 64)[None, :]
    rope = tl.load(ropes + start[:, None] + column, mask=live)
    tl.store(out + at[:, None] * 576 + 512 + column, rope, mask=live)
