"""The de-interleave map and the copy that uses it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.handoff.relayout import Field, copy_page, index_fields, mla_fields, strips
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding

shardings = st.builds(Sharding, st.integers(1, 16), st.sampled_from([1, 2, 8, 64]))


def rows_of(page: int, num_tokens: int, sharding: Sharding) -> list[tuple[int, int, int]]:
    """Each moved row as (row of the page, rank, row of the rank's block)."""
    rows = []
    for strip in strips(page, num_tokens, sharding):
        for segment in range(strip.num_segments):
            to_row = (strip.page_segment + segment * sharding.size) * sharding.interleave
            from_row = (strip.source_segment + segment) * sharding.interleave
            rows += [(to_row + i, strip.rank, from_row + i) for i in range(strip.num_rows)]
    return rows


@given(shardings, st.integers(0, 40), st.integers(1, BLOCK_TOKENS))
def test_each_wanted_row_of_a_page_is_moved_exactly_once(
    sharding: Sharding, page: int, num_tokens: int
) -> None:
    """A row moved twice hides a map error; a row past num_tokens would be another tenant's."""
    moved = sorted(row for row, _, _ in rows_of(page, num_tokens, sharding))

    assert moved == list(range(num_tokens))


@given(shardings, st.integers(0, 40), st.integers(1, BLOCK_TOKENS))
def test_strips_agree_with_the_ownership_formula(
    sharding: Sharding, page: int, num_tokens: int
) -> None:
    """Rank (t // I) % W, local row (t // (W * I)) * I + t % I, is how prefill writes."""
    block_start = page // sharding.size * BLOCK_TOKENS

    for row, rank, block_row in rows_of(page, num_tokens, sharding):
        token = page * BLOCK_TOKENS + row
        size, interleave = sharding.size, sharding.interleave
        assert rank == (token // interleave) % size
        local_row = token // (size * interleave) * interleave + token % interleave
        assert block_row == local_row - block_start


@settings(max_examples=50)
@given(
    st.integers(1, 16),
    st.sampled_from([1, 64]),
    st.integers(1, 2000),
    st.sampled_from([(Field(0, 5),), (Field(0, 3), Field(192, 2))]),
)
def test_dealing_out_and_copying_back_is_the_identity(
    num_ranks: int, interleave: int, num_tokens: int, fields: tuple[Field, ...]
) -> None:
    """Bytes dealt to ranks come back in order, and rows past the end stay as they were."""
    sharding = Sharding(num_ranks, interleave)
    page_bytes = sum(field.row_bytes for field in fields) * BLOCK_TOKENS
    num_pages = -(-num_tokens // BLOCK_TOKENS)
    num_blocks = -(-num_pages // num_ranks)
    truth = torch.randint(0, 250, (2, num_pages, page_bytes), dtype=torch.uint8)
    dealt = torch.full((num_ranks, num_blocks, 2, page_bytes), 255, dtype=torch.uint8)
    expected = torch.full_like(truth, 254)
    for token in range(num_tokens):
        page, row = divmod(token, BLOCK_TOKENS)
        rank = token // interleave % num_ranks
        local = token // (num_ranks * interleave) * interleave + token % interleave
        block, block_row = divmod(local, BLOCK_TOKENS)
        for field in fields:
            here = slice(field.offset + row * field.row_bytes, None)
            there = field.offset + block_row * field.row_bytes
            data = truth[:, page, here][:, : field.row_bytes]
            dealt[rank, block, :, there : there + field.row_bytes] = data
            expected[:, page, here][:, : field.row_bytes] = data

    result = torch.full_like(truth, 254)
    for page in range(num_pages):
        rows = min(BLOCK_TOKENS, num_tokens - page * BLOCK_TOKENS)
        parts = list(strips(page, rows, sharding))
        copy_page(dealt[:, page // num_ranks], result[:, page], parts, fields, sharding)

    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("kv_format", "page_bytes", "fields"),
    [
        pytest.param("fp8_ds_mla", 8448, (Field(0, 128), Field(8192, 4)), id="keys-then-scales"),
        pytest.param("fp32", 32768, (Field(0, 512),), id="keys-alone"),
    ],
)
def test_the_fields_of_an_index_page_fill_it(
    kv_format: str, page_bytes: int, fields: tuple[Field, ...]
) -> None:
    """Keys and scales lie apart in a page, so they are permuted apart."""
    assert index_fields(kv_format, page_bytes) == fields
    assert sum(field.row_bytes for field in fields) * BLOCK_TOKENS == page_bytes


def test_a_latent_page_is_its_rows() -> None:
    """656 bytes at the released dimensions."""
    assert mla_fields(656) == (Field(0, 656),)
