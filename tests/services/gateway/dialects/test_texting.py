"""What /tokenize and /detokenize accept."""

import json
from typing import Any

import pytest

from services.gateway.ask import Chat, Prompt, Text
from services.gateway.dialects.texting import read_detokenize, read_tokenize
from services.gateway.failures import InvalidRequest

USER = [{"role": "user", "content": "Hi"}]


def asked(**fields: Any) -> Prompt:
    return read_tokenize(json.dumps(fields).encode()).asked()


def test_a_prompt_is_a_text() -> None:
    """As in a completion."""
    assert asked(prompt="Hi", model="m", add_special_tokens=True) == Text("Hi")


def test_messages_are_a_chat() -> None:
    """As in a chat completion; the place of the answer may be left out."""
    assert asked(messages=USER) == Chat(USER)
    assert asked(messages=USER, add_generation_prompt=False) == Chat(
        USER, template_options={"add_generation_prompt": False}
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "x", "messages": USER}, "either prompt or messages"),
        ({"messages": USER, "continue_final_message": True}, "continue_final_message"),
        ({"messages": USER, "chat_template": "{}"}, "chat_template"),
        ({"messages": USER, "chat_template_kwargs": {"tools": []}}, "may not set tools"),
    ],
)
def test_what_is_not_served_is_named(fields: Any, words: str) -> None:
    """A known field whose meaning is not supported never passes in silence."""
    with pytest.raises(InvalidRequest, match=words):
        asked(**fields)


@pytest.mark.parametrize("tokens", [None, "x", [1, "x"], [-1], [1.0]])
def test_tokens_are_ids(tokens: Any) -> None:
    """No type is converted."""
    with pytest.raises(InvalidRequest):
        read_detokenize(json.dumps({"tokens": tokens}).encode())
