"""Quantises the indexer's new keys and stores them in their index pages.

A page of 64 keys is 64 x 128 e4m3 values, then 64 fp32 scales (`shared.engine.kv.format`).
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.e4m3 import encode, power_of_two, scale_exponent
from shared.engine.kernels.rows import check_slots

_KEY = 128
_PAGE_BYTES = 64 * 132
_TILE_KEYS = 32  # 4 KiB of codes a program


def insert_keys(
    keys: torch.Tensor,  # [n, 128] bf16, finite
    slots: torch.Tensor,  # [n] int64 page * 64 + offset, -1 = not stored, otherwise distinct
    pages: torch.Tensor,  # [num_pages, 8448] uint8, written in place
) -> None:
    """Store key i in slot slots[i]. Meaning: reference.kv_rows.insert_keys."""
    if keys.dtype != torch.bfloat16 or keys.shape[1:] != (_KEY,) or keys.stride(1) != 1:
        raise ValueError(f"keys must be [n, {_KEY}] bf16 with contiguous rows")
    if pages.dtype != torch.uint8 or pages.shape[1:] != (_PAGE_BYTES,) or pages.stride(1) != 1:
        raise ValueError(f"pages must be [num_pages, {_PAGE_BYTES}] bytes, each page contiguous")
    if pages.stride(0) % 16 or pages.storage_offset() % 16:
        raise ValueError("pages must begin at multiples of 16 bytes")
    check_slots(slots, len(keys))
    if not len(keys):
        return
    _insert_keys[(triton.cdiv(len(keys), _TILE_KEYS),)](
        keys,
        keys.stride(0),
        slots,
        pages,
        pages.view(torch.float32),
        pages.stride(0),
        len(keys),
        TILE_KEYS=_TILE_KEYS,
        num_warps=4,
    )


@triton.jit
def _insert_keys(
    keys,  # [n, 128] bf16
    key_stride,
    slots,  # [n]
    codes,  # the pages as bytes
    scales,  # the same as fp32
    page_bytes,  # from one page to the next
    num_keys,
    TILE_KEYS: tl.constexpr,
):
    key = tl.program_id(0).to(tl.int64) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    slot = tl.load(slots + key, mask=key < num_keys, other=-1)
    live = slot >= 0
    column = tl.arange(0, 128)[None, :]
    values = tl.load(keys + key[:, None] * key_stride + column, mask=live[:, None], other=0.0)
    values = values.to(tl.float32)
    exponent = scale_exponent(tl.max(tl.abs(values), 1))
    # Multiplying by the inverse of a power of two is exact.
    code = encode(values * power_of_two(254 - exponent)[:, None])
    page, offset = slot >> 6, slot & 63
    start = page * page_bytes + offset * 128
    tl.store(codes + start[:, None] + column, code, mask=live[:, None])
    at = page * (page_bytes // 4) + 64 * 128 // 4 + offset
    tl.store(scales + at, power_of_two(exponent), mask=live)
