"""Incremental text equals the tokenizer's own decoding of the whole."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parents[4] / "checkpoints" / "demo-fp8"
NUM_PLAIN_TOKENS = 4076  # control tokens follow


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(CHECKPOINT)


@pytest.fixture(scope="module")
def oracle() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(map(detokenizer.feed, ids)) + detokenizer.flush()


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, NUM_PLAIN_TOKENS - 1), max_size=24))
def test_any_tokens_one_by_one_decode_as_a_whole(
    tokenizer: Tokenizer, oracle: tokenizers.Tokenizer, ids: list[int]
) -> None:
    """Random tokens are mostly broken UTF-8: replacement characters must agree too."""
    assert decode(tokenizer, ids) == oracle.decode(ids)


@settings(deadline=None)
@given(text=st.text(max_size=24))
def test_text_survives_the_round_trip_token_by_token(tokenizer: Tokenizer, text: str) -> None:
    """Every code point, also those that take several tokens."""
    ids = tokenizer.encode(text)

    if all(token_id < NUM_PLAIN_TOKENS for token_id in ids):
        assert decode(tokenizer, ids) == text


@pytest.mark.parametrize("text", ["안녕하세요 세계", "👩‍👩‍👧 family", "naïve ﬃ 𝔘"])
def test_no_piece_ever_shows_half_a_code_point(tokenizer: Tokenizer, text: str) -> None:
    """A client prints each piece as it comes."""
    detokenizer = tokenizer.detokenizer()

    pieces = [detokenizer.feed(token_id) for token_id in tokenizer.encode(text)]

    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_control_and_stop_tokens_have_no_text_but_markup_has(tokenizer: Tokenizer) -> None:
    """`</think>` must reach the parser; `<|user|>` must reach nobody."""
    ids = tokenizer.encode("a</think>b<|user|><|endoftext|><|assistant|>")

    assert decode(tokenizer, ids) == "a</think>b"


def test_an_answer_that_ends_inside_a_code_point_says_so(tokenizer: Tokenizer) -> None:
    """The length limit may fall there."""
    ids = tokenizer.encode("한")

    assert len(ids) > 1
    assert decode(tokenizer, ids[:-1]) == "\ufffd"
