"""Undoes DCP's interleave: pages as W ranks hold them become pages in token order.

Token t lies on rank (t // I) % W in local row (t // (W * I)) * I + t % I, so the rows of one
64-token page that one rank holds are an arithmetic progression: a *strip*, moved by one strided
copy. Knows bytes, not NIXL.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shared.engine.kv.layout import BLOCK_TOKENS, Sharding

_SCALE_BYTES = 4


@dataclass(frozen=True)
class Field:
    """A part of a page that holds 64 equal rows: bytes [offset, offset + 64 * row_bytes)."""

    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Strip:
    """Segments of one page that one rank holds; a segment is I consecutive tokens.

    Segment k goes from segment `source_segment + k` of the rank's block to segment
    `page_segment + k * W` of the page; of each segment the first `num_rows` rows are moved.
    """

    rank: int
    source_segment: int
    page_segment: int
    num_segments: int
    num_rows: int


def mla_fields(row_bytes: int) -> tuple[Field, ...]:
    """A latent page is its 64 rows."""
    return (Field(0, row_bytes),)


def index_fields(kv_format: str, index_page_bytes: int) -> tuple[Field, ...]:
    """An fp8 index page is 64 keys, then 64 fp32 scales; an fp32 page is 64 keys."""
    row_bytes, remainder = divmod(index_page_bytes, BLOCK_TOKENS)
    assert remainder == 0, f"an index page of {index_page_bytes} bytes does not hold 64 rows"
    if kv_format == "fp32":
        return (Field(0, row_bytes),)
    assert kv_format == "fp8_ds_mla", kv_format
    key_bytes = row_bytes - _SCALE_BYTES
    return (Field(0, key_bytes), Field(BLOCK_TOKENS * key_bytes, _SCALE_BYTES))


def strips(page: int, num_tokens: int, sharding: Sharding) -> Iterator[Strip]:
    """Where the first num_tokens rows of a logical page lie; each row is in exactly one strip."""
    num_ranks, interleave = sharding.size, sharding.interleave
    per_page = BLOCK_TOKENS // interleave
    first_segment = page * per_page
    num_segments, tail_rows = divmod(num_tokens, interleave)
    block_start = page // num_ranks * per_page
    for rank in range(num_ranks):
        page_segment = (rank - first_segment) % num_ranks
        count = max(0, -((page_segment - num_segments) // num_ranks))
        source = (first_segment + page_segment) // num_ranks - block_start
        if count:
            yield Strip(rank, source, page_segment, count, interleave)
    if tail_rows:
        tail = first_segment + num_segments
        source = tail // num_ranks - block_start
        yield Strip(tail % num_ranks, source, num_segments, 1, tail_rows)


def copy_page(
    source: torch.Tensor,  # [W, num_layers, page_bytes] uint8, one effective block
    page: torch.Tensor,  # [num_layers, page_bytes] uint8, written in place
    parts: list[Strip],
    fields: tuple[Field, ...],
    sharding: Sharding,
) -> None:
    """Move the rows that `parts` names into `page`; other rows keep their bytes."""
    for field in fields:
        from_rows = _segments(
            source, field, sharding.interleave
        )  # [W, layers, 64 / I, I, row_bytes]
        to_rows = _segments(page, field, sharding.interleave)  # [layers, 64 / I, I, row_bytes]
        for part in parts:
            stop = part.page_segment + (part.num_segments - 1) * sharding.size + 1
            target = to_rows[:, part.page_segment : stop : sharding.size, : part.num_rows]
            first = part.source_segment
            target.copy_(
                from_rows[part.rank, :, first : first + part.num_segments, : part.num_rows]
            )


def _segments(pages: torch.Tensor, field: Field, interleave: int) -> torch.Tensor:
    stop = field.offset + BLOCK_TOKENS * field.row_bytes
    shape = (*pages.shape[:-1], BLOCK_TOKENS // interleave, interleave, field.row_bytes)
    return pages[..., field.offset : stop].view(shape)
