"""Segments: their ids are those of the whole text, and what was sent before is found again."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.segments import Cuts, SegmentCache

CHECKPOINT = Path(__file__).parents[4] / "checkpoints" / "demo-fp8"
DEFINITION: dict[str, Any] = json.loads((CHECKPOINT / "tokenizer.json").read_text())
ADDED = [token["content"] for token in DEFINITION["added_tokens"]]


def with_pre_tokenizer(step: dict[str, Any]) -> dict[str, Any]:
    return {**DEFINITION, "pre_tokenizer": step}


def digits_in_a_piece(run: str) -> dict[str, Any]:
    split, byte_level = DEFINITION["pre_tokenizer"]["pretokenizers"]
    pattern = split["pattern"]["Regex"].replace(r"|\p{N}|", rf"|\p{{N}}{run}|")
    steps = [{**split, "pattern": {"Regex": pattern}}, byte_level]
    return with_pre_tokenizer({"type": "Sequence", "pretokenizers": steps})


def byte_level(*, adds_space: bool) -> dict[str, Any]:
    step = {"type": "ByteLevel", "add_prefix_space": adds_space, "trim_offsets": True}
    return with_pre_tokenizer({**step, "use_regex": True})


def loaded(definition: dict[str, Any]) -> tuple[dict[str, Any], tokenizers.Tokenizer]:
    return definition, tokenizers.Tokenizer.from_str(json.dumps(definition))


ONE_DIGIT, THREE_DIGITS = loaded(digits_in_a_piece("")), loaded(digits_in_a_piece("{1,3}"))
UNKNOWN = loaded(byte_level(adds_space=False))


def ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


texts = st.lists(
    st.sampled_from([*ADDED, "<|us", "er|>", "[g", "'s", "'LL", "12345", "\r\n", "\n\n ", "   "])
    | st.sampled_from(
        ["word", "Wört", "한국", "你好。", "e\u0301", "ſ", "\u2028", "\xa0", "!?\n", "🙂"]
    )
    | st.text(max_size=4)
    | st.text("ab1 \n\r\t'.,<|>[]ภاि\u180e\u200b\u0301\x1c\x85\u3000", max_size=6),
    max_size=16,
).map("".join)


@settings(max_examples=250, deadline=None)
@given(
    text=texts,
    at_least=st.integers(1, 12),
    tokenizer_=st.sampled_from([ONE_DIGIT, THREE_DIGITS, UNKNOWN]),
)
def test_the_ids_of_the_segments_are_the_ids_of_the_text(
    text: str, at_least: int, tokenizer_: tuple[dict[str, Any], tokenizers.Tokenizer]
) -> None:
    """Also where only added tokens are known to split."""
    definition, tokenizer = tokenizer_
    cuts = Cuts(definition, at_least)

    segments = list(cuts.segments(text))

    assert cuts.is_possible
    assert "".join(segments) == text
    assert [one for segment in segments for one in ids(tokenizer, segment)] == ids(tokenizer, text)


@settings(max_examples=50, deadline=None)
@given(text=texts, more=texts, at_least=st.integers(1, 12))
def test_a_text_that_grew_has_the_segments_it_had(text: str, more: str, at_least: int) -> None:
    """All but the last: that is what makes a long conversation's next turn cheap."""
    cuts = Cuts(DEFINITION, at_least)
    before, after = list(cuts.segments(text)), list(cuts.segments(text + "<|user|>" + more))

    kept = max(0, len(before) - 1)
    assert before[:kept] == after[:kept]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"normalizer": {"type": "NFC"}}, id="texts-are-normalised"),
        pytest.param({"truncation": {"max_length": 3}}, id="texts-are-truncated"),
        pytest.param(byte_level(adds_space=True), id="a-space-is-put-before-each-piece"),
        pytest.param({"pre_tokenizer": {"type": "Metaspace"}}, id="another-pre-tokenizer"),
        pytest.param({"model": {**DEFINITION["model"], "dropout": 0.1}}, id="merges-are-random"),
        pytest.param(
            {"added_tokens": [{"content": "<a>", "lstrip": True}]}, id="a-token-eats-spaces"
        ),
        pytest.param(
            {"added_tokens": [{"content": "<a<"}, {"content": "<b>"}]}, id="tokens-overlap"
        ),
    ],
)
def test_a_tokenizer_that_may_reach_across_is_not_cut(change: dict[str, Any]) -> None:
    """Slow is better than other ids."""
    cuts = Cuts({**DEFINITION, **change}, 1)

    assert not cuts.is_possible
    assert list(cuts.segments("a b <|user|> c")) == ["a b <|user|> c"]


@pytest.mark.parametrize(
    "text", ["word ", "नमस्ते ", "สวัสดี\n", "你好，世界。", "0,1", "QUJD1a2b", "!= "]
)
def test_text_of_any_script_has_places_to_cut(text: str) -> None:
    """Else it would take long at once, and none of it would be known again."""
    segments = list(Cuts(DEFINITION, 100).segments(text * 500))

    assert max(map(len, segments)) < 100 + 2 * len(text)


def test_known_segments_are_not_encoded_again_but_for_another_tenant() -> None:
    """The time a prompt takes must not tell one tenant what another has sent."""
    cache, encoded = SegmentCache(10_000), []

    def encode(segment: str) -> bytes:
        encoded.append(segment)
        return segment.encode()

    answers = [cache.get(tenant, "text", encode) for tenant in ("a", "a", "b", "b")]

    assert answers == [b"text"] * 4
    assert encoded == ["text", "text"]


def test_the_cache_holds_no_more_than_it_may() -> None:
    """The least recently used goes first, and what is too large for it is not kept."""
    cache, encoded = SegmentCache(1000), []

    def encode(segment: str) -> bytes:
        encoded.append(segment)
        return bytes(100)

    for segment in ("a", "b", "a", "c", "d", "a", "b"):
        cache.get("", segment, encode)

    assert encoded == ["a", "b", "c", "d", "b"]
    assert cache.num_bytes <= 1000
    assert cache.get("", "huge", lambda _: bytes(2000)) == bytes(2000)
    assert cache.num_bytes <= 1000
