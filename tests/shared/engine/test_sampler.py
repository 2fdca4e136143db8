"""Drawing tokens: reproducible, within the nucleus, and continuing where another left off."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.sampler import asked_logprobs, sample, uniform
from shared.engine.step import Bits, Sampling, Shaping
from tests.shared.engine.shapings import VOCABULARY, bits, samplings

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


@given(samplings(), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_token_is_what_the_rules_say(sampling: Sampling, seed: int) -> None:
    """Each rule in plain Python, one token after another."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-20, 20, (1, VOCABULARY), generator=generator) / 4

    assert sample(logits, [sampling]) == [slowly_drawn(logits[0].tolist(), sampling)]


def slowly_drawn(logits: list[float], sampling: Sampling) -> int:
    scores = dict(enumerate(logits))
    if sampling.shaping is not None:
        scores = slowly_shaped(scores, sampling.shaping)
    scores = {token: x for token, x in scores.items() if token not in sampling.banned_token_ids}
    order = sorted(scores, key=lambda token: (-scores[token], token))
    if sampling.temperature == 0.0:
        return order[0]
    weight = {t: math.exp((scores[t] - scores[order[0]]) / sampling.temperature) for t in order}
    kept = order[: sampling.top_k or None]
    total, before = sum(weight[t] for t in kept), 0.0
    nucleus = []
    for token in kept:
        if before < sampling.top_p * total and weight[token] >= sampling.min_p:
            nucleus.append(token)
        before += weight[token]
    left = uniform(sampling.seed, sampling.index) * sum(weight[t] for t in nucleus)
    for token in nucleus:
        left -= weight[token]
        if left < 0:
            return token
    return nucleus[-1]


def slowly_shaped(scores: dict[int, float], shaping: Shaping) -> dict[int, float]:
    def is_in(bits: Bits, token: int) -> bool:
        return bool(bits[token // 8] >> token % 8 & 1)

    shaped = {}
    for token, score in scores.items():
        if shaping.seen is not None and is_in(shaping.seen, token):
            penalty = np.float32(shaping.repetition_penalty)
            score = float(np.float32(score) / penalty if score > 0 else np.float32(score) * penalty)
        if shaping.added_token_ids is not None and shaping.additions is not None:
            where = np.flatnonzero(shaping.added_token_ids == token)
            score += float(shaping.additions[where].sum())
        if shaping.allowed is None or is_in(shaping.allowed, token):
            shaped[token] = float(np.float32(score))
    return shaped


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    """Whatever was done to them before the token was drawn."""
    shaping = Shaping(allowed=bits([1]))
    sampling = Sampling(0.5, shaping=shaping, num_logprobs=2)
    logits = torch.linspace(-3, 3, VOCABULARY).unsqueeze(0)

    (told,) = asked_logprobs(logits, sample(logits, [sampling]), [sampling])

    assert told is not None
    wanted = torch.log_softmax(logits[0].double(), -1)
    assert np.frombuffer(told.chosen, "<f4").tolist() == pytest.approx([float(wanted[1])])
    assert np.frombuffer(told.top_token_ids, "<u4").tolist() == [49, 48]


def test_rows_are_drawn_independently() -> None:
    both = sample(LOGITS.repeat(2, 1), [Sampling(), Sampling(1.0, seed=7, index=3)])

    assert both == [0, sample(LOGITS, [Sampling(1.0, seed=7, index=3)])[0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_in_an_error(bad: float) -> None:
    """A result that might be wrong never becomes a token."""
    with pytest.raises(FloatingPointError):
        sample(torch.tensor([[bad, 0.0]]), [Sampling()])
