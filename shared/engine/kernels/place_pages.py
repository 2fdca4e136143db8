"""Puts pages that R ranks hold, interleaved by token, into their places in a pool, all layers.

A rank's pages come block by block with all layers together; the pool is layer by layer, its pages
in any order. Token t is row (t // (R * I)) * I + t % I of rank (t // I) % R
(`shared.engine.kv.layout.Sharding`). Either side may be pinned host memory: what crosses PCIe is
moved once, by few programs.
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.rows import widest_word
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding

_MAX_PAGES = 2**21  # of one call: pages times layers are counted in 32 bits, bytes in 64
_MAX_ROW_BYTES = 8192  # a program holds a page of rows
_WORDS_PER_WARP = 256  # eight a thread: as many loads are on their way at once
_MAX_WARPS = 32


def place_pages(
    shards: torch.Tensor,  # [R, blocks, layers, 64, row_bytes] uint8: a sequence's first blocks
    sharding: Sharding,
    first_page: int,
    num_tokens: int,
    page_ids: torch.Tensor,  # [ceil(num_tokens / 64)] int64: where pages first_page onwards go
    pages: torch.Tensor,  # [layers, num_pages, 64, row_bytes] uint8, written in place
    num_programs: int,
) -> None:
    """Copy the rows of tokens [64 * first_page, 64 * first_page + num_tokens); others keep theirs.

    No two page ids may be equal, and all must be pages of the pool. All tensors must be memory that
    the kernel's device reads. ValueError for shapes and strides that do not fit.
    Meaning: reference.kv_rows.place_pages.
    """
    _check(shards, sharding, first_page, num_tokens, page_ids, pages)
    if num_programs < 1:
        raise ValueError(f"{num_programs} programs copy nothing")
    if not num_tokens or not len(pages):
        return
    word = widest_word(shards, pages)
    words = pages.shape[-1] // word.itemsize
    tile = triton.next_power_of_2(BLOCK_TOKENS * words)
    _place_pages[(num_programs,)](
        shards.view(word),
        *(stride // word.itemsize for stride in shards.stride()[:3]),
        pages.view(word),
        *(stride // word.itemsize for stride in pages.stride()[:2]),
        page_ids,
        first_page,
        num_tokens,
        len(pages),
        sharding.size,
        sharding.interleave,
        WORDS=words,
        TILE=tile,
        num_warps=max(1, min(_MAX_WARPS, tile // _WORDS_PER_WARP)),
    )


def _check(
    shards: torch.Tensor,
    sharding: Sharding,
    first_page: int,
    num_tokens: int,
    page_ids: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    row_bytes = pages.shape[-1]
    for name, rows, dims in (("shards", shards, 5), ("pages", pages, 4)):
        if rows.dim() != dims or rows.dtype != torch.uint8:
            raise ValueError(f"{name} must be {dims}-dimensional bytes")
        if rows.shape[-2:] != (BLOCK_TOKENS, row_bytes) or rows.stride()[-2:] != (row_bytes, 1):
            raise ValueError(f"a page of {name} must be {BLOCK_TOKENS} rows of {row_bytes} bytes")
    if len(shards) != sharding.size or shards.shape[2] != len(pages):
        raise ValueError(f"shards must be [{sharding.size}, blocks, {len(pages)}, 64, row_bytes]")
    if row_bytes > _MAX_ROW_BYTES:
        raise ValueError(f"rows of {row_bytes} bytes, at most {_MAX_ROW_BYTES}")
    num_pages = -(-num_tokens // BLOCK_TOKENS)
    if first_page < 0 or not 0 <= num_pages <= _MAX_PAGES:
        raise ValueError(f"no {num_tokens} tokens from page {first_page} on in one call")
    if page_ids.dtype != torch.int64 or page_ids.shape != (num_pages,):
        raise ValueError(f"page_ids must be {num_pages} int64 numbers")
    if not page_ids.is_contiguous():
        raise ValueError("page_ids must be contiguous")
    if first_page + num_pages > shards.shape[1] * sharding.size:
        raise ValueError(
            f"{shards.shape[1]} blocks of {sharding.size} ranks end before page"
            f" {first_page + num_pages}"
        )


# Small numbers that differ from call to call: a kernel for each would be compiled during a pull.
@triton.jit(do_not_specialize=["first_page", "num_tokens", "ranks", "interleave"])
def _place_pages(
    shards,  # [ranks, blocks, num_layers, 64, WORDS]
    rank_stride,  # all strides in words
    block_stride,
    shard_layer_stride,
    pages,  # [num_layers, num_pages, 64, WORDS]
    layer_stride,
    page_stride,
    page_ids,
    first_page,
    num_tokens,
    num_layers,
    ranks,
    interleave,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,  # the words of a page, and up to a power of two
):
    word = tl.arange(0, TILE)
    row = word // WORDS
    num_items = (num_tokens + 63) // 64 * num_layers
    item = tl.program_id(0)
    while item < num_items:
        number, layer = item // num_layers, item % num_layers
        page_id = tl.load(page_ids + number)
        token = (first_page + number) * 64 + row
        segment = token // interleave
        local = segment // ranks * interleave + token % interleave
        rank = segment % ranks
        at_shard = rank.to(tl.int64) * rank_stride + (local // 64).to(tl.int64) * block_stride
        at_shard += layer.to(tl.int64) * shard_layer_stride + local % 64 * WORDS + word % WORDS
        at_page = layer.to(tl.int64) * layer_stride + page_id * page_stride + word
        live = (row < 64) & (number * 64 + row < num_tokens)
        tl.store(pages + at_page, tl.load(shards + at_shard, mask=live), mask=live)
        item += tl.num_programs(0)
