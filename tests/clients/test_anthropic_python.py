"""Anthropic's Python client, unchanged: messages, count_tokens, tools, errors."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.programs import KEY, MODEL

pytestmark = pytest.mark.clients

GREEDY = {"temperature": 0}  # this version has no argument for it
QUESTION: Any = [{"role": "user", "content": "What does river mean?"}]
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]


@pytest.fixture(scope="module", params=["x-api-key", "bearer"])
def client(root_url: str, request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    """Both ways in which its versions send a key; a retry would hide a failure."""
    key: Any = {"api_key": KEY} if request.param == "x-api-key" else {"auth_token": KEY}
    with anthropic.Anthropic(base_url=root_url, max_retries=0, timeout=300, **key) as made:
        yield made


def test_a_stream_of_a_message_tells_what_the_whole_tells(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 200, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        told = stream.get_final_message()

    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in whole.content][-1:] == ["text"]
    assert _blocks(told) == _blocks(whole)
    assert told.stop_reason == whole.stop_reason == "end_turn"
    assert told.usage.output_tokens == whole.usage.output_tokens > 0


def test_tokens_are_counted_as_they_are_billed(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS)
    made = client.messages.create(model=MODEL, messages=QUESTION, tools=TOOLS, max_tokens=4)

    usage = made.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached
    assert made.stop_reason == "max_tokens"


def test_a_tools_result_is_answered(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "tools": TOOLS, "max_tokens": 300, "extra_body": GREEDY}
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = client.messages.create(messages=messages, tool_choice={"type": "any"}, **asked)
    uses = [block for block in called.content if block.type == "tool_use"]
    answered = client.messages.create(
        messages=[
            *messages,
            {"role": "assistant", "content": [use.to_dict() for use in uses]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": use.id, "content": "12 degrees"}
                    for use in uses
                ],
            },
        ],
        **asked,
    )

    assert called.stop_reason == "tool_use"
    assert {use.name for use in uses} == {"get_weather"}
    assert set(uses[0].input) == {"city"}
    assert answered.usage.output_tokens > 0


def test_errors_are_the_ones_the_client_knows(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nobody", messages=QUESTION, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(model=MODEL, messages=[], max_tokens=4)
    with (
        anthropic.Anthropic(base_url=client.base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        stranger.messages.count_tokens(model=MODEL, messages=QUESTION)

    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index,call-overload]
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
    assert wrong.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]


def _blocks(message: Any) -> list[Any]:
    """What a message says, without the ids that every answer has of its own."""
    return [block.to_dict() | {"id": None} for block in message.content]
