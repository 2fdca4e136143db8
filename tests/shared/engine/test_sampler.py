"""Drawing tokens: reproducible, within the nucleus, and continuing where another left off."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.sampler import sample, uniform
from shared.engine.step import Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 2.0]])


def test_greedy_takes_the_best_and_the_lower_of_equals() -> None:
    assert sample(LOGITS, [Sampling()]) == [0]


def test_a_token_depends_on_seed_and_index_alone() -> None:
    """So a resumed answer, on any worker, goes on as it would have."""
    drawn = [sample(LOGITS, [Sampling(1.0, seed=7, index=i)])[0] for i in range(50)]
    again = [sample(LOGITS, [Sampling(1.0, seed=7, index=i)])[0] for i in range(50)]
    other = [sample(LOGITS, [Sampling(1.0, seed=8, index=i)])[0] for i in range(50)]

    assert drawn == again != other


def test_seeds_that_differ_in_their_last_bit_draw_differently() -> None:
    """Also at the upper end, where fp64 has no room for that bit."""
    assert uniform(2**64 - 1, 0) != uniform(2**64 - 2, 0)


def test_frequencies_follow_the_softmax() -> None:
    """4,000 draws; the bound is five standard deviations of the rarest token's count."""
    count = 4000
    drawn = [sample(LOGITS, [Sampling(1.0, seed=1, index=i)])[0] for i in range(count)]
    wanted = torch.softmax(LOGITS[0], -1)
    for token in range(5):
        p = float(wanted[token])
        assert abs(drawn.count(token) - count * p) < 5 * (count * p * (1 - p)) ** 0.5


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**20))
def test_nucleus_and_top_k_never_let_others_through(seed: int, index: int) -> None:
    """top_p 0.5 keeps the two best here, top_k 1 the first."""
    assert sample(LOGITS, [Sampling(1.0, top_p=0.5, seed=seed, index=index)])[0] in (0, 4)
    assert sample(LOGITS, [Sampling(5.0, top_k=1, seed=seed, index=index)]) == [0]
    assert 0.0 <= uniform(seed, index) < 1.0


def test_a_banned_token_is_never_drawn() -> None:
    """min_new_tokens bans the stop tokens until it is reached."""
    assert sample(LOGITS, [Sampling(banned_token_ids=(0,))]) == [4]


def test_rows_are_drawn_independently() -> None:
    both = sample(LOGITS.repeat(2, 1), [Sampling(), Sampling(1.0, seed=7, index=3)])

    assert both == [0, sample(LOGITS, [Sampling(1.0, seed=7, index=3)])[0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_in_an_error(bad: float) -> None:
    """A result that might be wrong never becomes a token."""
    with pytest.raises(FloatingPointError):
        sample(torch.tensor([[bad, 0.0]]), [Sampling()])
