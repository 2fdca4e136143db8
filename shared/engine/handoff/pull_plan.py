"""Cuts a pull into pieces that fit a staging lane, and says what of each rank a piece reads.

Pure arithmetic over token ranges. Effective block b covers tokens [64 * W * b, 64 * W * (b + 1))
and is one 64-row page on each of the W ranks; a rank whose page holds none of the wanted tokens is
not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.engine.kv.layout import Sharding


@dataclass(frozen=True)
class Piece:
    """Tokens [first_token, last_token) and the effective blocks that hold them."""

    first_token: int
    last_token: int
    first_block: int
    num_blocks: int
    blocks_of_rank: tuple[tuple[int, ...], ...]  # for each rank, effective block numbers to read


def pieces(
    first_token: int, last_token: int, sharding: Sharding, max_blocks: int
) -> Iterator[Piece]:
    """The pull of [first_token, last_token) in pieces of at most max_blocks effective blocks."""
    block_tokens = sharding.effective_block_tokens
    stride = block_tokens * max_blocks
    start = first_token
    while start < last_token:
        first_block = start // block_tokens
        stop = min(last_token, first_block * block_tokens + stride)
        num_blocks = (stop - 1) // block_tokens - first_block + 1
        yield Piece(
            first_token=start,
            last_token=stop,
            first_block=first_block,
            num_blocks=num_blocks,
            blocks_of_rank=_blocks_of_rank(start, stop, sharding),
        )
        start = stop


def owning_ranks(first_token: int, last_token: int, sharding: Sharding) -> set[int]:
    """The ranks that hold at least one of tokens [first_token, last_token)."""
    first_segment = first_token // sharding.interleave
    last_segment = (last_token - 1) // sharding.interleave
    segments = range(first_segment, last_segment + 1)[: sharding.size]
    return {segment % sharding.size for segment in segments}


def _blocks_of_rank(
    first_token: int, last_token: int, sharding: Sharding
) -> tuple[tuple[int, ...], ...]:
    block_tokens = sharding.effective_block_tokens
    blocks: list[list[int]] = [[] for _ in range(sharding.size)]
    for block in range(first_token // block_tokens, (last_token - 1) // block_tokens + 1):
        start = max(first_token, block * block_tokens)
        stop = min(last_token, (block + 1) * block_tokens)
        for rank in owning_ranks(start, stop, sharding):
            blocks[rank].append(block)
    return tuple(tuple(numbers) for numbers in blocks)
