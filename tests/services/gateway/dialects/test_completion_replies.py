"""Logprobs of completions: where tokens stand in the text, and how parts of characters are told."""

import json
from typing import Any

import pytest

from services.gateway.dialects.completion_replies import CompletionReplies
from services.gateway.dialects.completions import read
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta, LikelyToken, TokenLogprob
from services.gateway.text.glm import Content

PIECES = [b"a", "日".encode()[:1], "日".encode()[1:], "本".encode(), "🙂".encode()[:3]]
CONTROL = TokenLogprob("<|user|>", b"", -1.0)


def token(data: bytes, *, others: tuple[bytes, ...] = ()) -> TokenLogprob:
    top = tuple(LikelyToken(each.decode(errors="replace"), each, -2.0) for each in others)
    return TokenLogprob(data.decode(errors="replace"), data, -1.0, top)


def replies(**fields: Any) -> CompletionReplies:
    body = {"model": "m", "prompt": "x", "logprobs": 2, **fields}
    return CompletionReplies("m", read(json.dumps(body).encode()), 1)


def told(found: CompletionReplies) -> dict[str, Any]:
    logprobs: dict[str, Any] = found.whole(Usage())["choices"][0]["logprobs"]
    return logprobs


def test_offsets_count_characters_that_are_shown() -> None:
    """A character may be several tokens, and control tokens of an answer are not shown."""
    found = replies()

    found.feed(0, Delta([Content("a日")], [token(each) for each in PIECES[:3]]))
    found.feed(0, Delta([Content("本")], [CONTROL, *(token(each) for each in PIECES[3:])]))

    assert told(found)["text_offset"] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("has_echo", [False, True])
def test_control_tokens_of_an_echoed_prompt_have_their_places(has_echo: bool) -> None:
    """There they stand in the text by name; in the answer behind it they do not."""
    found = replies(echo=has_echo)

    found.feed(0, Delta([Content("<|user|>a")], [CONTROL, token(b"a")]))
    found.feed(0, Delta([Content("b")], [CONTROL, token(b"b")]))

    assert told(found)["text_offset"] == ([0, 8, 9, 9] if has_echo else [0, 0, 1, 1])


def test_parts_of_characters_are_told_by_their_bytes_and_none_is_lost() -> None:
    """By their texts they would be one key."""
    found = replies()

    found.feed(0, Delta([Content("")], [token(b"\xe6", others=(b"\xe7", b"\xe6", b"ok"))]))

    assert told(found)["tokens"] == ["bytes:\\xe6"]
    assert told(found)["top_logprobs"] == [{"ok": -2.0, "bytes:\\xe6": -1.0, "bytes:\\xe7": -2.0}]
