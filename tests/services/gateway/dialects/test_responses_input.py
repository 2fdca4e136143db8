"""The items of the Responses API become the turns that templates take."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from services.gateway.ask import Json
from services.gateway.dialects.responses_input import Items, conversation
from services.gateway.dialects.sealed import seal
from services.gateway.failures import InvalidRequest

ITEMS: TypeAdapter[Any] = TypeAdapter(Items)


def turns(given: Any, instructions: str | None = None) -> list[Json]:
    return conversation(instructions, ITEMS.validate_python(given))


def said(role: str, words: str) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}


def thought(words: str) -> Json:
    content = [{"type": "reasoning_text", "text": words}]
    return {"type": "reasoning", "id": "rs", "summary": [], "content": content}


def called(call_id: str, **more: Any) -> Json:
    call = {"type": "function_call", "call_id": call_id, "name": "get", "arguments": '{"x": 1}'}
    return {**call, **more}


def returned(call_id: str, output: Any = "rain") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


CALL = {"type": "function", "function": {"name": "get", "arguments": {"x": 1}}}


def test_a_string_is_the_user_s() -> None:
    """With the instructions before it."""
    assert turns("Hi", "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_message_needs_no_type() -> None:
    """The easy form."""
    easy = {"role": "user", "content": "Hi"}

    assert turns([easy]) == turns([said("user", "Hi")]) == [easy]


def test_what_the_assistant_did_in_one_answer_is_one_turn() -> None:
    """Reasoning, text and calls, as they came out."""
    items = [thought("Hm."), said("assistant", "I look."), called("a"), called("b"), returned("a")]

    assert turns(items) == [
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [{"id": "a", **CALL}, {"id": "b", **CALL}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]


def test_answers_are_told_apart() -> None:
    """By what lies between them, by new reasoning, and by a second message."""
    items = [
        thought("1"),
        called("a"),
        returned("a"),
        thought("2"),
        said("assistant", "x"),
        thought("3"),
        said("assistant", "y"),
        said("assistant", "z"),
    ]

    found = turns(items)

    assert [turn["role"] for turn in found] == [
        "assistant",
        "tool",
        "assistant",
        "assistant",
        "assistant",
    ]
    assert [turn.get("reasoning_content") for turn in found] == ["1", None, "2", "3", None]


def test_text_after_calls_stays_in_their_turn() -> None:
    """Else the results would not follow the calls."""
    found = turns([called("a"), said("assistant", "Wait."), returned("a")])

    assert [turn["role"] for turn in found] == ["assistant", "tool"]
    assert found[0]["content"] == "Wait."


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "summary": [], "encrypted_content": seal("Hm.")},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        thought("Hm."),
    ],
)
def test_reasoning_comes_back_in_every_form(item: Json) -> None:
    """Sealed, as a summary, or open."""
    (turn,) = turns([item, said("assistant", "x")])

    assert turn["reasoning_content"] == "Hm."


def test_another_server_s_reasoning_is_refused() -> None:
    """It cannot be read, and without it the model would not know what it thought."""
    with pytest.raises(InvalidRequest, match=r"input\.0: encrypted_content") as refused:
        turns([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}])

    assert refused.value.param == "input"


def test_media_are_left_to_the_template() -> None:
    """Which says that they cannot be read; in results too."""
    image = {"type": "input_image", "image_url": "data:"}
    words = {"type": "input_text", "text": "See"}

    found = turns([{"role": "user", "content": [words, image]}, returned("a", [image])])

    assert found[0]["content"] == [{"type": "text", "text": "See"}, {"type": "image"}]
    assert found[1]["content"] == [{"type": "image"}]


def test_a_namespaced_call_has_the_name_that_the_model_knows() -> None:
    """As it was offered."""
    (turn,) = turns([called("a", namespace="agents")])

    assert turn["tool_calls"][0]["function"]["name"] == "agents.get"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "item_reference", "id": "x"}, "'item_reference' items are not supported"),
        ({"type": "web_search_call"}, "'web_search_call' items are not supported"),
        ({"type": "function_call", "call_id": "a", "name": "b"}, "needs arguments"),
        ({"role": "king", "content": "x"}, "the role is one of"),
        ({"role": "user", "content": [{"type": "odd"}]}, "'odd' parts are not supported"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "need text"),
        ({"role": "user"}, "needs content"),
    ],
)
def test_what_cannot_be_read_is_named(item: Json, words: str) -> None:
    """Never left out in silence."""
    with pytest.raises(ValidationError, match=words):
        turns([item])


def test_arguments_must_be_an_object() -> None:
    """Templates print them key by key."""
    with pytest.raises(InvalidRequest, match=r"input\.0: arguments must be a JSON object"):
        turns([called("a", arguments="[1]")])
