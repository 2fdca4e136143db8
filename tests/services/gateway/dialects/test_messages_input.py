"""Anthropic's messages become the turns that templates take."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from services.gateway.ask import Json
from services.gateway.dialects.messages_input import (
    Blocks,
    Turn,
    conversation,
    without_old_thinking,
)
from services.gateway.dialects.sealed import seal

BLOCKS: TypeAdapter[Any] = TypeAdapter(Blocks)


def turns(*messages: Json, system: Any = None) -> list[Json]:
    found = None if system is None else BLOCKS.validate_python(system)
    return conversation(found, [Turn.model_validate(message) for message in messages])


def user(*content: Any) -> Json:
    return {"role": "user", "content": list(content)}


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def test_a_lone_text_is_text_in_either_form() -> None:
    """Templates see no difference between a string and a list of one block."""
    assert turns({"role": "user", "content": "Hi"}) == turns(user(text("Hi")))
    assert turns(user(text("Hi"))) == [{"role": "user", "content": "Hi"}]


def test_the_system_prompt_comes_first() -> None:
    """As text or as blocks, whose cache_control says nothing here."""
    system = [text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")]

    found = turns(user(text("Hi")), {"role": "system", "content": "Now."}, system=system)

    assert found[0] == {"role": "system", "content": [text("Be brief."), text("Be kind.")]}
    assert found[2] == {"role": "system", "content": "Now."}


def test_claude_code_s_billing_note_is_not_for_the_model() -> None:
    """It differs between conversations and would part their prefixes at the first token."""
    system = [text("x-anthropic-billing-header: cc_version=1;"), text("Be brief.")]

    assert turns(user(text("Hi")), system=system)[0]["content"] == "Be brief."


def test_an_assistant_s_blocks_are_one_turn() -> None:
    """Reasoning, text and calls stand where templates look for them."""
    content = [
        {"type": "thinking", "thinking": "Hm. ", "signature": "any"},
        {"type": "redacted_thinking", "data": "xx"},
        {"type": "thinking", "thinking": "", "signature": seal("Well.")},
        text("I look."),
        {"type": "tool_use", "id": "t1", "name": "get", "input": {"x": 1}},
    ]

    (turn,) = turns({"role": "assistant", "content": content})

    assert turn == {
        "role": "assistant",
        "reasoning_content": "Hm. Well.",
        "content": "I look.",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "get", "arguments": {"x": 1}}}
        ],
    }


def test_tool_results_become_turns_in_their_places() -> None:
    """What the user adds stays after them."""
    first: Json = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}
    second: Json = {
        "type": "tool_result",
        "tool_use_id": "t2",
        "content": [text("sun"), {"type": "image", "source": {}}],
    }

    found = turns(user(first, second, text("So?"), {"type": "document", "source": {}}))

    assert found == [
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "content": [text("sun"), {"type": "image"}]},
        {"role": "user", "content": [text("So?"), {"type": "document"}]},
    ]


def test_a_result_without_content_is_empty() -> None:
    """Tools may say nothing."""
    (turn,) = turns(user({"type": "tool_result", "tool_use_id": "t1"}))

    assert turn["content"] == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (user({"type": "server_tool_use"}), "'server_tool_use' blocks are not supported"),
        (user({"type": "text"}), "a text block needs text"),
        (user({"type": "tool_use", "id": "a", "name": "b", "input": {}}), "has no tool_use blocks"),
        (
            {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
            "has no tool_result blocks",
        ),
        (
            user(
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "thinking", "thinking": "x"}],
                }
            ),
            "has no thinking blocks in it",
        ),
        (user(7), "valid dictionary"),
        ({"role": "king", "content": "x"}, "'user', 'assistant' or 'system'"),
    ],
)
def test_what_cannot_be_read_is_named(message: Json, words: str) -> None:
    """Never left out in silence."""
    with pytest.raises(ValidationError, match=words):
        turns(message)


def test_old_thinking_goes_where_the_client_says_so() -> None:
    """The last turns keep theirs."""
    found = [{"role": "assistant", "reasoning_content": word, "content": word} for word in "abc"]

    kept = without_old_thinking(found, 1)

    assert ["reasoning_content" in turn for turn in kept] == [False, False, True]
    assert without_old_thinking(found, 5) == found
