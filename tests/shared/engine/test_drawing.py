"""What was asked and what is written so far decide how the next token is drawn."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import farspan_pb2 as pb
from shared.engine.drawing import Drawing
from shared.engine.sampler import sample
from shared.errors import BadRequest
from shared.grammar import Vocabulary
from shared.stop_tokens import stop_token_ids
from tests.demo import CHECKPOINT, tokenizer

SIZE = 4096
VOCABULARY = Vocabulary(CHECKPOINT, SIZE)
STOPS = stop_token_ids(CHECKPOINT)
JSON = pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text='start: %json {"type": "object"}')
PROMPT = [5, 6, 7, 7]


def drawing(answer: list[int], **asked: Any) -> Drawing:
    """Of an attempt that goes on after this answer."""
    token_ids = np.array([*PROMPT, *answer], np.uint32)
    return Drawing(pb.SamplingParams(**{"top_p": 1.0, **asked}), token_ids, len(answer), VOCABULARY)


def generate(begun: Drawing, count: int) -> list[int]:
    """Tokens of a model that likes few tokens, the same at each place."""
    answer = []
    while len(answer) < count and not begun.is_over:
        sampling = begun.next()
        generator = torch.Generator().manual_seed(sampling.index)
        logits = torch.randn((1, SIZE), generator=generator)
        logits[0, 300:310] += 6
        (token_id,) = sample(logits, [sampling])
        begun.take(token_id)
        answer.append(token_id)
    return answer


def additions(made: Drawing) -> dict[int, float]:
    shaping = made.next().shaping
    assert shaping is not None and shaping.additions is not None
    assert shaping.added_token_ids is not None
    return dict(zip(shaping.added_token_ids.tolist(), shaping.additions.tolist(), strict=True))


@pytest.mark.parametrize("count", [64, 65, 128, 129, 1024])
def test_any_number_of_tokens_may_have_a_bias(count: int) -> None:
    """Beside penalties, and after a resume."""
    ids = list(range(0, 4 * count, 4))
    made = drawing([1, 2], bias_token_ids=ids, biases=[float(each) for each in ids])

    assert additions(made) == {**{each: float(each) for each in ids}, 1: 0.0, 2: 0.0}


def test_nothing_is_done_to_the_logits_unless_asked() -> None:
    assert drawing([1], repetition_penalty=1.0).next().shaping is None
    assert drawing([1]).next().shaping is None


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(0, 30))
@settings(deadline=None)
def test_penalties_count_the_answer_and_bias_is_added(answer: list[int], num_resumed: int) -> None:
    """Also what an attempt before has written; the prompt counts for nothing."""
    resumed, later = answer[:num_resumed], answer[num_resumed:]
    made = drawing(
        resumed,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bias_token_ids=[3, 30],
        biases=[8.0, -4.0],
    )
    for token_id in later:
        made.take(token_id)

    expected = Counter({3: 8.0, 30: -4.0})
    for token_id, count in Counter(answer).items():
        expected[token_id] -= 0.25 * count + 0.5
    assert additions(made) == dict(expected)


def test_an_answer_of_any_number_of_tokens_is_counted() -> None:
    made = drawing([], frequency_penalty=1.0)
    for token_id in [*range(1000), *range(500)]:
        made.take(token_id)

    assert additions(made) == {token: -2.0 if token < 500 else -1.0 for token in range(1000)}


def test_a_repetition_is_of_prompt_or_answer() -> None:
    made = drawing([100], repetition_penalty=1.5)
    made.take(200)

    shaping = made.next().shaping
    assert shaping is not None and shaping.seen is not None
    seen = np.flatnonzero(np.unpackbits(shaping.seen, bitorder="little")).tolist()
    assert seen == [5, 6, 7, 100, 200]
    assert shaping.repetition_penalty == 1.5


@pytest.mark.parametrize("num_resumed", [1, 4, 17])
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"temperature": 1.0, "seed": 3}, id="seed"),
        pytest.param({"frequency_penalty": 1.0, "presence_penalty": 0.3}, id="penalties"),
        pytest.param({"repetition_penalty": 1.7, "temperature": 0.7}, id="repetition"),
        pytest.param({"grammar": JSON, "temperature": 1.0}, id="grammar"),
        pytest.param({"stop_token_ids": [305], "min_new_tokens": 12}, id="least"),
    ],
)
def test_a_resumed_answer_goes_on_as_it_would_have(asked: dict[str, Any], num_resumed: int) -> None:
    whole = generate(drawing([], **asked), 25)
    before = whole[:num_resumed]
    least = max(asked.get("min_new_tokens", 0) - num_resumed, 0)

    after = generate(drawing(before, **{**asked, "min_new_tokens": least}), 25 - num_resumed)

    assert before + after == whole


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_with_a_grammar_is_a_text_of_it(seed: int) -> None:
    """At any temperature; what the model would rather say is not allowed."""
    grammar = pb.Grammar(
        kind=pb.GRAMMAR_KIND_LARK,
        text='start: %json {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}',
    )

    answer = generate(drawing([], grammar=grammar, temperature=2.0, seed=seed), 200)

    assert answer[-1] in STOPS
    assert isinstance(json.loads(tokenizer().decode(answer[:-1])), list)


def test_a_complete_text_ends_in_spite_of_min_new_tokens() -> None:
    """Else there would be no token to draw: a known fault of others."""
    grammar = pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text='start: "yes"')
    asked = {"grammar": grammar, "min_new_tokens": 50, "stop_token_ids": STOPS}

    answer = generate(drawing([], **asked), 60)

    assert tokenizer().decode(answer[:-1]) == "yes"
    assert answer[-1] in STOPS


def test_stop_tokens_wait_for_min_new_tokens() -> None:
    made = drawing([], stop_token_ids=[7, 8], min_new_tokens=1)
    assert made.next().banned_token_ids == (7, 8)

    made.take(1)

    assert made.next().banned_token_ids == ()


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_is_drawn() -> None:
    bad = pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text="start: missing")
    with pytest.raises(BadRequest):
        drawing([], grammar=bad)
    with pytest.raises(BadRequest):
        drawing([1000, 1001], grammar=JSON)
