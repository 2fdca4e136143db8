"""Partition and ownership as properties, for every W up to 16, both interleaves, all lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.kv.layout import (
    BLOCK_TOKENS,
    Sharding,
    is_replicated,
    plan_queries,
    query_chunks,
)

ranks = st.integers(1, 16)
interleaves = st.sampled_from([1, 64])
lengths = st.integers(0, 5000)


@given(num_tokens=st.lists(lengths, min_size=1, max_size=4), num_ranks=ranks)
def test_gathered_rows_come_back_in_order(num_tokens: list[int], num_ranks: int) -> None:
    """restore(gather(x)) is x: every step token is computed once, or alike on all ranks."""
    plan = plan_queries(num_tokens, num_ranks)
    tokens = np.arange(sum(num_tokens))

    locals_ = [tokens[rows] for rows in plan.local_tokens]
    replicated = locals_[0][: plan.num_replicated]
    padded = np.full((num_ranks, plan.padded_len), -1)
    for rank, local in enumerate(locals_):
        assert np.array_equal(local[: plan.num_replicated], replicated)
        own = local[plan.num_replicated :]
        padded[rank, : len(own)] = own

    assert np.array_equal(np.concatenate((replicated, padded.ravel()))[plan.restore], tokens)


@given(num_tokens=lengths, num_ranks=ranks)
def test_a_cut_prompt_is_computed_once_and_evenly(num_tokens: int, num_ranks: int) -> None:
    """Each token on one rank; causal work of any two ranks differs by at most a chunk's worth."""
    if is_replicated(num_tokens, num_ranks):
        plan = plan_queries([num_tokens], num_ranks)
        assert plan.padded_len == 0 and plan.num_replicated == num_tokens
        return
    shares = query_chunks(num_tokens, num_ranks)
    tokens = sorted(t for pair in shares for chunk in pair for t in chunk)
    work = [sum(t + 1 for chunk in pair for t in chunk) for pair in shares]
    chunk_tokens = -(-num_tokens // (2 * num_ranks))

    assert tokens == list(range(num_tokens))
    assert all(len(chunk) > 0 for pair in shares for chunk in pair)
    assert max(work) - min(work) <= chunk_tokens * num_tokens


def test_only_short_prompts_are_replicated() -> None:
    """On 8 ranks the longest prompt with an empty chunk has 225 tokens (enumerated)."""
    replicated = [n for n in range(1, 5001) if is_replicated(n, 8)]

    assert max(replicated) == 225
    assert not any(is_replicated(n, 8) for n in (64, 226, 1000))


@given(num_tokens=lengths, size=ranks, interleave=interleaves)
def test_every_token_is_kept_in_one_row_of_one_rank(
    num_tokens: int, size: int, interleave: int
) -> None:
    """Ownership is a bijection onto dense shards, so each slot is written exactly once."""
    sharding = Sharding(size, interleave)
    positions = np.arange(num_tokens)
    owner, row = sharding.owner(positions), sharding.local_row(positions)

    for rank in range(size):
        rows = row[owner == rank]
        assert len(rows) == sharding.num_local(num_tokens, rank)
        assert np.array_equal(np.sort(rows), np.arange(len(rows)))


@given(num_tokens=lengths, size=ranks, interleave=interleaves)
def test_gathered_shards_are_put_in_token_order(
    num_tokens: int, size: int, interleave: int
) -> None:
    """The de-interleave map reads every token from where its owner's pages put it."""
    sharding = Sharding(size, interleave)
    positions = np.arange(num_tokens)
    num_blocks = -(-num_tokens // sharding.effective_block_tokens)
    shards = np.full((size, num_blocks * BLOCK_TOKENS), -1)
    shards[sharding.owner(positions), sharding.local_row(positions)] = positions

    order = sharding.gathered_row(positions, num_blocks * BLOCK_TOKENS)

    assert np.array_equal(shards.ravel()[order], positions)


def test_pages_go_round_the_ranks_when_the_interleave_is_a_page() -> None:
    """With I = 64, block b of rank r holds logical page b * W + r."""
    sharding = Sharding(4, 64)
    page = np.arange(64 * 11) // 64

    assert np.array_equal(sharding.owner(np.arange(64 * 11)), page % 4)
    assert np.array_equal(sharding.local_row(np.arange(64 * 11)) // 64, page // 4)


@pytest.mark.parametrize(("size", "interleave"), [(0, 1), (2, 0), (2, 48), (2, 128)])
def test_a_layout_that_cuts_a_page_unevenly_is_refused(size: int, interleave: int) -> None:
    """An interleave must divide the page."""
    with pytest.raises(ValueError, match="no layout"):
        Sharding(size, interleave)
