"""How a pull is cut, and what it reads."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.handoff.pull_plan import owning_ranks, pieces
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding

shardings = st.builds(Sharding, st.integers(1, 16), st.sampled_from([1, 8, 64]))
ranges = st.tuples(st.integers(0, 40), st.integers(1, 3000)).map(
    lambda pair: (pair[0] * BLOCK_TOKENS, pair[0] * BLOCK_TOKENS + pair[1])
)


@given(shardings, ranges, st.integers(1, 9))
def test_pieces_cover_the_range_once_and_fit_the_lane(
    sharding: Sharding, tokens: tuple[int, int], max_blocks: int
) -> None:
    """A gap would leave a page unwritten, an oversized piece would overrun the staging lane."""
    plan = list(pieces(*tokens, sharding, max_blocks))

    assert plan[0].first_token == tokens[0]
    assert plan[-1].last_token == tokens[1]
    for piece, following in itertools.pairwise(plan):
        assert piece.last_token == following.first_token
        assert piece.last_token % BLOCK_TOKENS == 0
    for piece in plan:
        block_tokens = sharding.effective_block_tokens
        assert piece.first_block == piece.first_token // block_tokens
        assert piece.first_block + piece.num_blocks == -(-piece.last_token // block_tokens)
        assert piece.num_blocks <= max_blocks


@given(shardings, ranges, st.integers(1, 9))
def test_a_rank_is_read_exactly_where_it_holds_wanted_tokens(
    sharding: Sharding, tokens: tuple[int, int], max_blocks: int
) -> None:
    """With page round-robin most short deltas touch few ranks; the others are left alone."""
    wanted: list[set[int]] = [set() for _ in range(sharding.size)]
    for token in range(*tokens):
        rank = token // sharding.interleave % sharding.size
        wanted[rank].add(token // sharding.effective_block_tokens)

    read: list[list[int]] = [[] for _ in range(sharding.size)]
    for piece in pieces(*tokens, sharding, max_blocks):
        for rank, blocks in enumerate(piece.blocks_of_rank):
            read[rank] += blocks

    assert read == [sorted(blocks) for blocks in wanted]


def test_one_token_is_on_one_rank() -> None:
    """The shortest tail reads one rank."""
    assert owning_ranks(130, 131, Sharding(4, 64)) == {2}
    assert owning_ranks(130, 131, Sharding(4, 1)) == {2}
