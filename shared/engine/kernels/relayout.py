"""Puts rows that R ranks hold, interleaved by token, into token order, and back.

Token t is row (t // (R * I)) * I + t % I of rank (t // I) % R (`shared.engine.kv.layout.Sharding`).
Knows rows of any width: whole fp8_ds_mla rows (656 B), key records (132 B), or the two fields of
index pages, keys (128 B) and scales (4 B), as two strided views.
"""

import torch
import triton
import triton.language as tl

from shared.engine.kernels.rows import widest_word
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding

_TILE_BYTES = 8192  # a program's share
_MAX_TOKENS = 2**30  # tokens are counted in 32 bits, bytes in 64


def to_token_order(
    shards: torch.Tensor,  # [R, pages, 64, row_bytes] uint8: each rank's rows in its local order
    sharding: Sharding,
    num_tokens: int,
    out: torch.Tensor,  # [pages, 64, row_bytes] uint8, written in place
) -> None:
    """Row t of out becomes token t's, t < num_tokens; other rows keep their bytes.

    Meaning: reference.kv_rows.to_token_order.
    """
    _move(shards, sharding, num_tokens, out, to_tokens=True)


def to_shards(
    tokens: torch.Tensor,  # [pages, 64, row_bytes] uint8, in token order
    sharding: Sharding,
    num_tokens: int,
    out: torch.Tensor,  # [R, pages, 64, row_bytes] uint8, written in place
) -> None:
    """The inverse of to_token_order. Meaning: reference.kv_rows.to_shards."""
    _move(out, sharding, num_tokens, tokens, to_tokens=False)


def _move(
    shards: torch.Tensor,
    sharding: Sharding,
    num_tokens: int,
    tokens: torch.Tensor,
    *,
    to_tokens: bool,
) -> None:
    row_bytes = tokens.shape[-1]
    _check(shards, sharding, num_tokens, tokens)
    if not num_tokens:
        return
    word = widest_word(shards, tokens)
    words = row_bytes // word.itemsize
    tile = _TILE_BYTES // word.itemsize
    kernel = _gather if to_tokens else _scatter
    kernel[(triton.cdiv(num_tokens, tile // words),)](
        shards.view(word),
        shards.stride(0) // word.itemsize,
        shards.stride(1) // word.itemsize,
        tokens.view(word),
        tokens.stride(0) // word.itemsize,
        num_tokens,
        RANKS=sharding.size,
        INTERLEAVE=sharding.interleave,
        WORDS=words,
        TILE=tile,
        num_warps=8,
    )


def _check(shards: torch.Tensor, sharding: Sharding, num_tokens: int, tokens: torch.Tensor) -> None:
    row_bytes = tokens.shape[-1]
    for name, pages in (("shards", shards), ("tokens", tokens)):
        if pages.dtype != torch.uint8 or pages.shape[-2:] != (BLOCK_TOKENS, row_bytes):
            raise ValueError(f"{name} must be pages of {BLOCK_TOKENS} rows of equally many bytes")
        if pages.stride()[-2:] != (row_bytes, 1):
            raise ValueError(f"the rows of a page of {name} must be contiguous")
    if shards.dim() != 4 or tokens.dim() != 3 or len(shards) != sharding.size:
        raise ValueError(f"shards must be [{sharding.size}, pages, 64, row_bytes]")
    needed = sharding.num_local(num_tokens, 0)  # no rank has more than the first
    if num_tokens > _MAX_TOKENS:
        raise ValueError(f"{num_tokens} tokens at once, at most {_MAX_TOKENS}")
    if not 0 <= num_tokens <= len(tokens) * BLOCK_TOKENS:
        raise ValueError(f"{len(tokens)} pages hold no {num_tokens} tokens")
    if needed > shards.shape[1] * BLOCK_TOKENS:
        raise ValueError(f"a shard of {shards.shape[1]} pages holds no {needed} rows")


@triton.jit
def _places(
    rank_stride,  # all strides in words
    page_stride,
    token_page_stride,
    num_tokens,
    RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    WORDS: tl.constexpr,  # a row
    TILE: tl.constexpr,
):
    """Where each word of this tile lies in the shards and in token order, and whether it is one."""
    word = tl.arange(0, TILE)
    number = word // WORDS  # the tile's last words may fill no row
    token = tl.program_id(0) * (TILE // WORDS) + number
    word = word % WORDS
    is_whole = number < TILE // WORDS
    segment = token // INTERLEAVE
    row = segment // RANKS * INTERLEAVE + token % INTERLEAVE
    rank, page, token_page = segment % RANKS, row // 64, token // 64
    at_shard = rank.to(tl.int64) * rank_stride + page.to(tl.int64) * page_stride
    at_shard += row % 64 * WORDS + word
    at_token = token_page.to(tl.int64) * token_page_stride + token % 64 * WORDS + word
    return at_shard, at_token, is_whole & (token < num_tokens)


@triton.jit
def _gather(
    shards,  # [R, pages, 64, WORDS]
    rank_stride,
    page_stride,
    tokens,  # [pages, 64, WORDS]
    token_page_stride,
    num_tokens,
    RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    at_shard, at_token, live = _places(
        rank_stride, page_stride, token_page_stride, num_tokens, RANKS, INTERLEAVE, WORDS, TILE
    )
    tl.store(tokens + at_token, tl.load(shards + at_shard, mask=live), mask=live)


@triton.jit
def _scatter(
    shards,
    rank_stride,
    page_stride,
    tokens,
    token_page_stride,
    num_tokens,
    RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    at_shard, at_token, live = _places(
        rank_stride, page_stride, token_page_stride, num_tokens, RANKS, INTERLEAVE, WORDS, TILE
    )
    tl.store(shards + at_shard, tl.load(tokens + at_token, mask=live), mask=live)
