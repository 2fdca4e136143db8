"""Chat completions: what a body asks for, and which part of a wrong one is named."""

import json
from typing import Any

import pytest

from services.gateway.ask import (
    Chat,
    Form,
    JsonObject,
    JsonSchema,
    Lark,
    Named,
    OneOf,
    Regex,
)
from services.gateway.dialects.chat import read
from services.gateway.failures import InvalidRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f"}}


def asked(**fields: Any) -> Chat:
    body = {"model": "m", "messages": [USER], **fields}
    (prompt,) = read(json.dumps(body).encode()).ask().prompts
    assert isinstance(prompt, Chat)
    return prompt


@pytest.mark.parametrize(
    ("given", "choice", "num_tools"),
    [
        (None, "auto", 1),
        ("auto", "auto", 1),
        ("required", "required", 1),
        ("none", "auto", 0),
        (CALL, Named("f"), 1),
    ],
)
def test_a_tool_choice_says_what_is_offered_and_what_must_be(
    given: Any, choice: Any, num_tools: int
) -> None:
    """With "none" the model does not hear of tools (V5 67)."""
    chat = asked(tools=[TOOL], tool_choice=given)

    assert (chat.tool_choice, len(chat.tools)) == (choice, num_tools)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("any", "tool_choice.type"),
        ({"type": "function"}, "function is missing"),
        ({"type": "function", "function": {"name": "g"}}, "'g'"),
        (7, "tool_choice"),
    ],
)
def test_a_wrong_tool_choice_is_told_in_one_line(choice: Any, words: str) -> None:
    """Not as the branches of a union that it might have been."""
    with pytest.raises(InvalidRequest, match=words) as refused:
        asked(tools=[TOOL], tool_choice=choice)

    assert refused.value.param == "tool_choice"


def test_no_effort_is_no_thinking() -> None:
    """Other words are the template's to read."""
    assert asked(reasoning_effort="none").template_options == {"enable_thinking": False}
    assert asked(reasoning_effort="high").template_options == {"reasoning_effort": "high"}


def test_one_call_at_a_time_is_passed_on() -> None:
    """Grammar and parser keep it."""
    assert asked().is_parallel
    assert not asked(parallel_tool_calls=False).is_parallel


FORMS: list[tuple[dict[str, Any], Form | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, JsonObject()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
        JsonSchema({"a": 1}),
    ),
    ({"structured_outputs": {"json": '{"a": 1}'}}, JsonSchema({"a": 1})),
    ({"structured_outputs": {"json": True}}, JsonSchema(True)),
    ({"structured_outputs": {"json_object": True}}, JsonObject()),
    ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, OneOf(("a", "b"))),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Lark('start: "a"')),
]


@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_a_form_may_be_said_in_two_ways(fields: dict[str, Any], form: Form | None) -> None:
    """OpenAI's and vLLM's."""
    body = {"model": "m", "messages": [USER], **fields}

    assert read(json.dumps(body).encode()).ask().form == form


def test_earlier_calls_come_to_the_template_as_objects() -> None:
    """And no field that was not sent."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}

    (turn,) = asked(messages=[{"role": "assistant", "tool_calls": [call]}]).messages

    assert turn == {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"a": [1]}}}],
    }


def test_arguments_of_millions_of_values_are_not_parsed() -> None:
    """They are JSON within JSON, and a parser keeps all other threads waiting."""
    function = {"name": "f", "arguments": f"[{'{},' * 600_000}1]"}
    calling = {"role": "assistant", "tool_calls": [{"function": function}]}

    with pytest.raises(InvalidRequest, match="holds more than") as refused:
        asked(messages=[calling])

    assert refused.value.param == "messages"
