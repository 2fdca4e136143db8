"""Tokens drawn on a device follow the rules of `shared.engine.sampler`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import farspan_pb2 as pb
from shared.engine.gpu.sampler import AskedLogprobs, draw
from shared.engine.sampler import asked_logprobs, sample
from shared.engine.step import Sampling
from tests.shared.engine.shapings import VOCABULARY, samplings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(num_rows: int, seed: int, *, steps: int) -> torch.Tensor:
    """Logits with many ties: multiples of a quarter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, steps, (num_rows, VOCABULARY), generator=generator) / 4


@given(st.lists(samplings(), min_size=1, max_size=8), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_batch_draws_what_each_row_draws_alone(rows: list[Sampling], seed: int) -> None:
    """Ties, penalties, masks, greedy rows beside drawn ones; the uniform number never lies on a
    step of the cumulative sum, where the last bit of fp64 would decide.
    """
    logits = numbers(len(rows), seed, steps=20)
    on_device = logits.clone().to(DEVICE)

    asked = AskedLogprobs(on_device, rows)
    drawn = draw(on_device, rows)
    told = asked.messages(asked.numbers(drawn).cpu().numpy())

    assert drawn.tolist() == sample(logits, rows)
    for one, other in zip(told, asked_logprobs(logits, drawn.tolist(), rows), strict=True):
        assert tops(one) == tops(other)
        assert values(one) == pytest.approx(values(other), abs=1e-5)


def tops(told: pb.TokenLogprobs | None) -> bytes:
    return b"none" if told is None else told.top_token_ids


def values(told: pb.TokenLogprobs | None) -> list[float]:
    data = b"" if told is None else told.chosen + told.top_logprobs
    return np.frombuffer(data, "<f4").tolist()


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
