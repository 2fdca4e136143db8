"""Tokens drawn on a device follow the rules of `shared.engine.sampler`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.gpu.sampler import draw
from shared.engine.sampler import sample
from shared.engine.step import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 50

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 7, VOCABULARY, 200]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 1000),
    banned_token_ids=st.lists(
        st.integers(0, VOCABULARY - 1), max_size=VOCABULARY - 1, unique=True
    ).map(tuple),
)


def numbers(num_rows: int, seed: int, *, steps: int) -> torch.Tensor:
    """Logits with many ties: multiples of a quarter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, steps, (num_rows, VOCABULARY), generator=generator) / 4


@given(st.lists(samplings, min_size=1, max_size=8), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_batch_draws_what_each_row_draws_alone(rows: list[Sampling], seed: int) -> None:
    """Ties, banned tokens, greedy rows beside drawn ones; the uniform number never lies on a step
    of the cumulative sum, where the last bit of fp64 would decide.
    """
    logits = numbers(len(rows), seed, steps=20)

    drawn = draw(logits.clone().to(DEVICE), rows)

    assert drawn.tolist() == sample(logits, rows)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_no_token(value: float) -> None:
    """The row is told; its neighbours are drawn."""
    logits = numbers(3, 0, steps=20)
    expected = sample(logits, [Sampling()] * 3)
    logits[1, 7] = value

    drawn = draw(logits.to(DEVICE), [Sampling(), Sampling(temperature=1.0), Sampling()])

    assert drawn.tolist() == [expected[0], -1, expected[2]]


def test_a_row_whose_tokens_are_all_banned_gives_none() -> None:
    """Nothing may be drawn; that is no token rather than a banned one."""
    banned = tuple(range(VOCABULARY))

    drawn = draw(
        numbers(1, 0, steps=20).to(DEVICE), [Sampling(temperature=1.0, banned_token_ids=banned)]
    )

    assert drawn.tolist() == [-1]
