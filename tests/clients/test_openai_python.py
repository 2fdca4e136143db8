"""OpenAI's Python client, unchanged: chat, completions, responses, models, errors."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.programs import KEY, MODEL
from tests.system.dialogs import NO_THINKING

pytestmark = pytest.mark.clients

QUESTION: Any = [{"role": "user", "content": "What does river mean?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


class Answer(pydantic.BaseModel):
    """What a client asks to be filled in."""

    kind: bool
    size: int


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    """A retry would hide a failure."""
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0, timeout=300) as made:
        yield made


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_stream_of_a_chat_tells_what_the_whole_tells(client: openai.OpenAI) -> None:
    """Text, reasoning, finish reason, usage: the same seed, told in two ways."""
    asked: Any = {"model": MODEL, "messages": QUESTION, "seed": 7, "max_tokens": 40}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )

    (choice,) = whole.choices
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.delta.content or "" for piece in told) == (choice.message.content or "")
    assert [piece.finish_reason for piece in told if piece.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == []
    assert _counts(chunks[-1].usage) == _counts(whole.usage)
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 40


def test_every_token_of_a_chat_has_its_logprob(client: openai.OpenAI) -> None:
    """The first comes from prefill, the others from decode."""
    made = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )

    assert made.choices[0].logprobs is not None
    tokens = made.choices[0].logprobs.content
    assert tokens is not None
    assert len(tokens) == 8
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)


def test_several_choices_come_apart_in_both_ways(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL, "messages": QUESTION, "seed": 3, "max_tokens": 12, "n": 3,
        "extra_body": NO_THINKING,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert texts == [choice.message.content or "" for choice in whole.choices]


def test_a_required_tool_is_called_with_json(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=TOOLS,
        tool_choice="required",
        max_tokens=200,
        temperature=0,
        extra_body=NO_THINKING,
    )

    assert made.choices[0].finish_reason == "tool_calls"
    (call, *_) = made.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_an_answer_takes_the_form_of_a_pydantic_model(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        response_format=Answer,
        max_tokens=100,
        temperature=0,
        extra_body=NO_THINKING,
    )

    assert isinstance(made.choices[0].message.parsed, Answer)


def test_a_completion_echoes_its_prompt_with_logprobs(client: openai.OpenAI) -> None:
    """Token ids as prompts, two at once: what evaluation harnesses send."""
    made = client.completions.create(
        model=MODEL,
        prompt=[[101, 102, 103, 104], [201, 202]],
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
        seed=1,
    )

    assert [choice.index for choice in made.choices] == [0, 1]
    for choice, num_tokens in zip(made.choices, (5, 3), strict=True):
        assert choice.logprobs is not None
        given = choice.logprobs.token_logprobs
        assert given is not None
        assert len(given) == num_tokens
        assert given[0] is None
        assert all(value is not None and value <= 0 for value in given[1:])
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (6, 2)


def test_a_stream_of_a_completion_tells_what_the_whole_tells(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL, "prompt": "A river is", "max_tokens": 20, "temperature": 0,
    }  # fmt: skip
    whole = client.completions.create(**asked)
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )

    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text
    assert _counts(chunks[-1].usage) == _counts(whole.usage)


def test_a_stream_of_a_response_tells_what_the_whole_tells(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL, "input": "What does river mean?", "temperature": 0,
        "max_output_tokens": 200, "store": False,
    }  # fmt: skip
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        told = stream.get_final_response()

    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert whole.status == told.status == "completed"
    assert told.output_text == whole.output_text
    assert whole.usage is not None
    assert told.usage is not None
    assert told.usage.output_tokens == whole.usage.output_tokens
    assert told.usage.input_tokens == whole.usage.input_tokens > 0


def test_a_response_calls_a_tool(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": False, **TOOLS[0]["function"]}
    made = client.responses.create(
        model=MODEL,
        input="What is the weather in Oslo?",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=300,
        temperature=0,
    )

    calls = [item for item in made.output if item.type == "function_call"]
    assert [call.name for call in calls][:1] == ["get_weather"]
    assert set(json.loads(calls[0].arguments)) == {"city"}


def test_errors_are_the_ones_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=0)
    with (
        openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()

    assert refused.value.code == "invalid_api_key"
    assert unknown.value.code == "model_not_found"
    assert wrong.value.type == "invalid_request_error"


def _counts(usage: Any) -> tuple[int, int, int]:
    """Cached tokens may differ between two askings; what was asked and made may not."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
