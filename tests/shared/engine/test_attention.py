"""Selection against a plain sort, sparse attention against dense attention under a mask.

Scores are made of small integers, so equal scores are frequent and arithmetic is exact.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.attention import (
    attend_gathered,
    index_scores,
    select_positions,
    sparse_attention,
    top_positions,
)

HEADS, DIM, VALUE_DIM = 2, 8, 5
SCALE = 0.25
# A masked dense softmax adds in another order; values are of the order of 1.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """torch.empty gives NaN, so an element that was never written cannot pass."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


def integers(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_selection(scores: list[float], first: int, limit: int, topk: int) -> list[int]:
    allowed = [position for position in range(len(scores)) if first <= position <= limit]
    return sorted(sorted(allowed, key=lambda position: (-scores[position], position))[:topk])


def test_fresh_memory_really_is_nan() -> None:
    assert torch.isnan(torch.empty(100)).all()


@given(
    seed=st.integers(0, 2**30),
    num_queries=st.integers(1, 12),
    num_keys=st.integers(1, 40),
    topk=st.integers(1, 44),
    first=st.integers(0, 1),
    data=st.data(),
)
@settings(deadline=None, max_examples=150)
def test_the_chosen_are_the_best_and_the_earlier_of_equals(
    seed: int, num_queries: int, num_keys: int, topk: int, first: int, data: st.DataObject
) -> None:
    """Ties are frequent, limits arbitrary, fewer or more keys than top-k, position 0 or 1 first."""
    limits = data.draw(
        st.lists(st.integers(0, num_keys - 1), min_size=num_queries, max_size=num_queries)
    )
    query, keys = integers(seed, num_queries, HEADS, DIM), integers(seed + 1, num_keys, DIM)
    weights = integers(seed + 2, num_queries, HEADS)

    chosen = select_positions(query, weights, keys, torch.tensor(limits), first, topk)

    assert chosen.shape == (num_queries, topk)
    scores = torch.einsum("qh,qhk->qk", weights, torch.relu(query @ keys.T))
    for row, limit in enumerate(limits):
        expected = naive_selection(scores[row].tolist(), first, limit, topk)
        missing = [-1] * (chosen.shape[1] - len(expected))
        assert chosen[row].tolist() == expected + missing


def test_a_query_chooses_alone() -> None:
    """Large enough that queries are worked through in several tiles, the last one short."""
    num_queries, num_keys, heads, topk = 19, 2048, 32, 100
    query, keys = integers(1, num_queries, heads, 4), integers(2, num_keys, 4)
    weights, limits = integers(3, num_queries, heads), torch.arange(num_queries) * 113

    chosen = select_positions(query, weights, keys, limits, 0, topk)

    for row, limit in enumerate(limits.tolist()):
        one = slice(row, row + 1)
        alone = select_positions(query[one], weights[one], keys[: limit + 1], limits[one], 0, topk)
        assert chosen[row][: alone.shape[1]].tolist() == alone[0].tolist()
        assert chosen[row][alone.shape[1] :].eq(-1).all()


@pytest.mark.parametrize("num_keys", [257, 261, 512, 513, 777])
def test_equal_keys_have_equal_scores_wherever_they_and_the_query_stand(num_keys: int) -> None:
    """The lower of two equal keys at the threshold is chosen, in a tile and alone."""
    num_queries, heads, topk = 24, 32, 64
    query, weights = normal(1, num_queries, heads, 128), normal(2, num_queries, heads)
    limits = torch.full((num_queries,), num_keys - 1)
    for row in range(num_queries):
        keys, one = normal(3, num_keys, 128), slice(row, row + 1)
        scores = torch.einsum("h,hk->k", weights[row], torch.relu(query[row] @ keys.T))
        last_chosen = int(scores.argsort(descending=True)[topk - 1])
        keys[0] = keys[last_chosen]

        together = select_positions(query, weights, keys, limits, 0, topk)[row]
        alone = select_positions(query[one], weights[one], keys, limits[one], 0, topk)[0]

        assert torch.equal(together, alone)
        assert together[0] == 0


def test_negative_weights_count() -> None:
    """A head may speak against a key; its ReLU comes before its weight."""
    query, keys = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[1.0], [-1.0], [2.0]])

    chosen = select_positions(query, torch.tensor([[1.0, -3.0]]), keys, torch.tensor([2]), 0, 1)

    assert chosen.tolist() == [[1]]


def test_scores_fill_no_more_than_their_buffer() -> None:
    """The buffer is reused from tile to tile and may be longer than a tile needs."""
    buffer = torch.full((200,), 7.0)

    scores = index_scores(
        integers(1, 3, HEADS, DIM), integers(2, 3, HEADS), integers(3, 32, DIM), buffer
    )

    assert scores.shape == (3, 32)
    assert torch.isfinite(scores).all()
    assert (buffer[3 * HEADS * 32 :] == 7.0).all()


@given(st.integers(0, 2**30), st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_masked_scores_are_taken_last(seed: int, width: int) -> None:
    """-inf is a score like any other when a row has nothing better."""
    scores = integers(seed, 4, 30)
    scores[integers(seed + 1, 4, 30) > 0] = -torch.inf

    chosen = top_positions(scores, width)

    for row in range(4):
        expected = naive_selection(scores[row].tolist(), 0, 29, width)
        assert sorted(chosen[row].tolist()) == expected


@given(
    seed=st.integers(0, 2**30),
    num_queries=st.integers(1, 6),
    num_rows=st.integers(1, 20),
    width=st.integers(1, 20),
)
@settings(deadline=None, max_examples=80)
def test_sparse_attention_is_dense_attention_under_a_mask(
    seed: int, num_queries: int, num_rows: int, width: int
) -> None:
    """Any subset of rows per query, the empty one included; missing places at the end."""
    generator = torch.Generator().manual_seed(seed)
    is_chosen = torch.rand((num_queries, num_rows), generator=generator) < 0.5
    is_chosen &= is_chosen.cumsum(1) <= width
    query, rows = normal(seed, num_queries, HEADS, DIM), normal(seed + 1, num_rows, DIM)
    chosen = torch.full((num_queries, width), -1)
    for number, row in enumerate(is_chosen):
        places = torch.nonzero(row).flatten()
        chosen[number, : len(places)] = places

    out = sparse_attention(query, rows, chosen, VALUE_DIM, SCALE)

    scores = torch.einsum("qhd,kd->qhk", query, rows) * SCALE
    scores = scores.masked_fill(~is_chosen[:, None], -torch.inf)
    dense = torch.softmax(scores, -1).nan_to_num(0.0) @ rows[:, :VALUE_DIM]
    torch.testing.assert_close(out, dense, **TOLERANCE)


def test_a_query_without_positions_gives_zeros() -> None:
    """The MTP layer's token 0 has nothing to attend to; its output must be a number."""
    chosen = torch.tensor([[-1, -1, -1], [0, 1, -1]])

    out = sparse_attention(normal(1, 2, HEADS, DIM), normal(2, 2, DIM), chosen, VALUE_DIM, SCALE)

    assert torch.equal(out[0], torch.zeros(HEADS, VALUE_DIM))
    assert out[1].abs().sum() > 0


def test_no_position_at_all_gives_zeros() -> None:
    out = sparse_attention(
        normal(1, 2, HEADS, DIM), normal(2, 3, DIM), torch.empty((2, 0), dtype=torch.int64), 5, 1.0
    )

    assert torch.equal(out, torch.zeros(2, HEADS, 5))


def test_a_query_attends_alone() -> None:
    """Large enough for several tiles; every query is written, the last short tile's too."""
    num_queries, width = 17, 300
    query, rows = normal(1, num_queries, HEADS, DIM), normal(2, 400, DIM)
    chosen = torch.arange(width).expand(num_queries, -1) + torch.arange(num_queries)[:, None]

    out = sparse_attention(query, rows, chosen, VALUE_DIM, SCALE)

    everywhere = torch.ones((1, width), dtype=torch.bool)
    for number in range(num_queries):
        one = slice(number, number + 1)
        alone = attend_gathered(query[one], rows[chosen[one]], everywhere, VALUE_DIM, SCALE)
        torch.testing.assert_close(out[one], alone, **TOLERANCE)


def test_what_lies_in_missing_places_does_not_matter() -> None:
    """Decode gathers some row there; a huge one must not leak into the softmax."""
    query, gathered = normal(1, 1, HEADS, DIM), normal(2, 1, 4, DIM)
    is_valid = torch.tensor([[True, True, False, False]])
    poisoned = gathered.clone()
    poisoned[:, 2:] = 1e4

    out = attend_gathered(query, gathered, is_valid, VALUE_DIM, SCALE)

    assert torch.equal(attend_gathered(query, poisoned, is_valid, VALUE_DIM, SCALE), out)
