"""Quantises new latent rows and stores them as fp8_ds_mla rows in their slots.

One read of the latent, one write of the row; the layout is in `shared.engine.kv.format`. The rows'
pages may be one layer's view of a block-major pool, and may lie in pinned host memory.
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.e4m3 import encode, power_of_two, scale_exponent
from shared.engine.kernels.rows import check_row_pages, check_slots

_LATENT = 576
_TILE_ROWS = 8  # 4 KiB of codes a program


def insert_rows(
    latent: torch.Tensor,  # [n, 576] bf16, finite: 512 latent values, then 64 rotary ones
    slots: torch.Tensor,  # [n] int64 page * 64 + offset, -1 = not stored, otherwise distinct
    pages: torch.Tensor,  # [num_pages, 64, 656] uint8, written in place
) -> None:
    """Store row i of latent in slot slots[i]. Meaning: reference.kv_rows.insert_rows."""
    if latent.dtype != torch.bfloat16 or latent.shape[1:] != (_LATENT,) or latent.stride(1) != 1:
        raise ValueError(f"latent must be [n, {_LATENT}] bf16 with contiguous rows")
    check_row_pages(pages)
    check_slots(slots, len(latent))
    if not len(latent):
        return
    _insert_rows[(triton.cdiv(len(latent), _TILE_ROWS),)](
        latent,
        latent.stride(0),
        slots,
        pages,
        pages.view(torch.float32),
        pages.view(torch.bfloat16),
        pages.stride(0),
        len(latent),
        TILE_ROWS=_TILE_ROWS,
        num_warps=2,
    )


@triton.jit
def _insert_rows(
    latent,  # [n, 576] bf16
    latent_stride,
    slots,  # [n]
    codes,  # the pages as bytes
    scales,  # the same as fp32
    ropes,  # the same as bf16
    page_bytes,  # from one page to the next
    num_rows,
    TILE_ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE_ROWS
    # Rows of this tile are four groups of 128 values that share a scale.
    group = tl.arange(0, TILE_ROWS * 4)
    row = first + group // 4
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    live = slot >= 0
    column = (group % 4)[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(latent + row[:, None] * latent_stride + column, mask=live[:, None], other=0.0)
    values = values.to(tl.float32)
    exponent = scale_exponent(tl.max(tl.abs(values), 1))
    # Multiplying by the inverse of a power of two is exact.
    code = encode(values * power_of_two(254 - exponent)[:, None])
    start = (slot >> 6) * page_bytes + (slot & 63) * 656
    tl.store(codes + start[:, None] + column, code, mask=live[:, None])
    tl.store(scales + start // 4 + 128 + group % 4, power_of_two(exponent), mask=live)

    row = first + tl.arange(0, TILE_ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    live = (slot >= 0)[:, None]
    column = tl.arange(0, 64)[None, :]
    rope = tl.load(latent + row[:, None] * latent_stride + 512 + column, mask=live)
    start = (slot >> 6) * (page_bytes // 2) + (slot & 63) * 328 + 264
    tl.store(ropes + start[:, None] + column, rope, mask=live)
