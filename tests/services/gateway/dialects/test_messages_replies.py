"""What Anthropic's clients are told: streams and whole messages are the same."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.ask import Json
from services.gateway.dialects.dialect import Ending, Event, Opening
from services.gateway.dialects.messages_replies import MESSAGES, MessagesReplies, anthropic_error
from services.gateway.dialects.sealed import unseal
from services.gateway.failures import HttpFailure
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta
from services.gateway.text.glm import Content, Part, Reasoning, ToolCall
from shared import farspan_pb2 as pb
from tests.services.gateway.stage import MODEL, Stage

USAGE = Usage(prompt_tokens=20, cached_tokens=8, completion_tokens=5, reasoning_tokens=2)
USER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
STOP = Ending(pb.FINISH_REASON_STOP)
TEXTS = st.text(min_size=1, max_size=4)
PARTS = st.one_of(
    TEXTS.map(Reasoning),
    TEXTS.map(Content),
    TEXTS.map(lambda text: ToolCall("get", json.dumps({"x": text}))),
)


def play(
    parts: list[Part], ending: Ending = STOP, *, hides_thinking: bool = False
) -> tuple[list[Event], Json]:
    """A whole answer's events, and its message."""
    replies = MessagesReplies("m", hides_thinking=hides_thinking)
    events = replies.begin(Opening(Usage(20, 8)))
    for part in parts:
        events += replies.feed(0, Delta([part]))
    events += replies.finish(0, ending) + replies.end(USAGE)
    return events, replies.whole(USAGE)


def assembled(events: list[Event]) -> Json:
    """The message as a client puts it together; asserts the protocol's order on the way."""
    message: Json = {}
    inputs: dict[int, str] = {}
    is_open = False
    for event in events:
        assert event.data["type"] == event.name
        match event.data:
            case {"type": "message_start", "message": begun}:
                assert not message
                message = {**begun, "content": []}
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert not is_open and index == len(message["content"])
                is_open = True
                message["content"].append(dict(block))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert is_open and index == len(message["content"]) - 1
                block = message["content"][index]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        block[name] += delta[name]
                inputs[index] = inputs.get(index, "") + delta.get("partial_json", "")
            case {"type": "content_block_stop", "index": index}:
                assert is_open and index == len(message["content"]) - 1
                is_open = False
                if message["content"][index]["type"] == "tool_use":
                    message["content"][index]["input"] = json.loads(inputs[index])
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message.update(delta, usage=usage)
    assert not is_open and events[-1].name == "message_stop"
    return message


@settings(max_examples=50)
@given(st.lists(PARTS, max_size=8), st.booleans())
def test_a_stream_adds_up_to_the_whole(parts: list[Part], hides_thinking: bool) -> None:
    """Whatever comes after whatever."""
    events, whole = play(parts, hides_thinking=hides_thinking)

    assert assembled(events) == whole


@settings(max_examples=50)
@given(st.lists(PARTS, max_size=6), st.data())
def test_how_a_text_was_cut_does_not_matter(parts: list[Part], data: st.DataObject) -> None:
    """A lagging client gets fewer and longer pieces."""
    pieces: list[Part] = []
    for part in parts:
        if isinstance(part, ToolCall) or len(part.text) < 2:
            pieces.append(part)
            continue
        at = data.draw(st.integers(1, len(part.text) - 1))
        pieces += [type(part)(part.text[:at]), type(part)(part.text[at:])]

    (_, whole), (_, cut) = play(parts), play(pieces)

    for message in (whole, cut):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert whole == cut


def test_input_tokens_are_those_that_no_cache_held() -> None:
    """Clients of this API add the cached ones themselves; counted twice they would be billed so."""
    events, whole = play([Content("x")])

    assert whole["usage"]["input_tokens"] == 12
    assert whole["usage"]["cache_read_input_tokens"] == 8
    assert whole["usage"]["cache_creation_input_tokens"] == 0
    assert whole["usage"]["output_tokens"] == 5
    assert events[0].data["message"]["usage"]["input_tokens"] == 12


@pytest.mark.parametrize(
    ("parts", "ending", "reason", "sequence"),
    [
        ([Content("x")], STOP, "end_turn", None),
        ([Content("x")], Ending(pb.FINISH_REASON_LENGTH), "max_tokens", None),
        ([Content("x")], Ending(pb.FINISH_REASON_STOP, "END"), "stop_sequence", "END"),
        ([ToolCall("get", "{}")], STOP, "tool_use", None),
    ],
)
def test_the_stop_reason_says_why(
    parts: list[Part], ending: Ending, reason: str, sequence: str | None
) -> None:
    """Agents go on by it."""
    _, whole = play(parts, ending)

    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_omitted_thinking_is_carried_in_the_signature() -> None:
    """The client does not see it, and gives it back all the same."""
    events, whole = play([Reasoning("deep"), Reasoning(" thought")], hides_thinking=True)

    (block,) = whole["content"]
    assert block["thinking"] == ""
    assert unseal(block["signature"]) == "deep thought"
    assert not any("deep" in json.dumps(event.data) for event in events)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (418, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_the_api_s_form(status: int, kind: str) -> None:
    """The SDK's exception classes go by status, its users by type."""
    told = anthropic_error(HttpFailure(status, "no"))

    assert told["type"] == "error"
    assert told["error"] == {"type": kind, "message": "no"}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no worker holds so much", "prompt is too long: no worker holds so much"),
        ("the prompt is too long: 9 tokens > 5", "the prompt is too long: 9 tokens > 5"),
    ],
)
def test_what_is_too_long_is_said_in_the_words_that_clients_know(message: str, told: str) -> None:
    """Claude Code then shortens the conversation."""
    failure = HttpFailure(400, message, code="context_length_exceeded")

    assert anthropic_error(failure)["error"]["message"] == told


# ---------------------------------------------------------- the SDK


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key="none", max_retries=0) as made:
        yield made


def without_ids(message: Any) -> Json:
    """What two answers to one request have in common."""
    told: Json = message.model_dump(exclude={"id"}, exclude_none=True)
    for block in told["content"]:
        block.pop("id", None)
    return told


async def test_the_sdk_reads_a_stream_as_it_reads_the_whole(
    stage: Stage, client: anthropic.AsyncAnthropic
) -> None:
    """With thinking, text and two calls."""
    stage.plan(f"The user asks.</think>I look.{CALL}{CALL}", cached_tokens=7)
    request: Any = {"model": MODEL, "max_tokens": 100, "messages": USER, "tools": [WEATHER]}

    whole = await client.messages.create(**request)
    async with client.messages.stream(**request) as stream:
        streamed = await stream.get_final_message()

    assert without_ids(streamed) == without_ids(whole)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    call = whole.content[2]
    assert call.type == "tool_use" and call.input == {"city": "Paris"}
    assert whole.stop_reason == "tool_use"
    assert whole.usage.cache_read_input_tokens == 7
    num_prompt = len(stage.fleet.submits[0].token_ids) // 4
    assert whole.usage.input_tokens + 7 == num_prompt


async def test_a_count_is_what_the_messages_cost(
    stage: Stage, client: anthropic.AsyncAnthropic
) -> None:
    """Clients budget by it."""
    stage.plan("One.")
    request: Any = {"model": MODEL, "messages": USER, "tools": [WEATHER], "system": "Be brief."}

    counted = await client.messages.count_tokens(**request)
    answer = await client.messages.create(max_tokens=10, **request)

    assert counted.input_tokens == answer.usage.input_tokens


async def test_the_model_sees_its_calls_and_their_results(
    stage: Stage, client: anthropic.AsyncAnthropic
) -> None:
    """What the SDK gives back is what the model wrote: the prompt goes on where it ended."""
    first = stage.plan(f"I call it.</think>{CALL}")
    request: Any = {"model": MODEL, "max_tokens": 100, "tools": [WEATHER]}
    answer = await client.messages.create(messages=USER, **request)
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "It rains."}
    messages = [
        *USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]

    stage.plan("Rain.</think>It rains.")
    await client.messages.create(messages=messages, **request)

    before, after = (
        stage.tokenizer.decode(ids(submit), skips_special=False) for submit in stage.fleet.submits
    )
    written = stage.tokenizer.decode(first.answer[:-1], skips_special=False)
    assert after.startswith(before + written)
    assert "<tool_response>It rains.</tool_response>" in after


def ids(submit: pb.Submit) -> list[int]:
    data = submit.token_ids
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


async def test_a_stop_sequence_is_named(stage: Stage, client: anthropic.AsyncAnthropic) -> None:
    """And is not part of the text."""
    stage.plan("Fine.</think>One two END three")

    answer = await client.messages.create(
        model=MODEL, max_tokens=100, messages=USER, stop_sequences=["END"]
    )

    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    text = answer.content[-1]
    assert text.type == "text" and text.text == "One two "


async def test_refusals_are_the_sdk_s_exceptions(
    stage: Stage, client: anthropic.AsyncAnthropic
) -> None:
    """With the words that say what is wrong."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="gpt-5", max_tokens=10, messages=USER)
    with pytest.raises(anthropic.BadRequestError) as wrong:
        await client.messages.create(
            model=MODEL,
            max_tokens=10,
            messages=USER,
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
        )

    assert "not_found_error" in str(missing.value)
    assert "web_search_20250305" in str(wrong.value)
    assert not stage.fleet.submits


async def test_the_sdk_s_tool_runner_runs(stage: Stage, client: anthropic.AsyncAnthropic) -> None:
    """It asks for a thread first, and goes on without one when it is told that there is none."""
    stage.plan(f"hm</think>{CALL}")
    stage.plan("hm</think>Rain.")

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather now."""
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, messages=USER, tools=[get_weather]
    )
    last = await runner.until_done()

    assert last.content[-1].text == "Rain."  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["output_config.format", "output_format"])
async def test_a_refusal_names_the_field(stage: Stage, name: str) -> None:
    """This API's own; in the message, since there is no other place."""
    form: Any = {"type": "json_schema", "schema": {"not": {}}}
    fields = {"output_config": {"format": form}} if "." in name else {name: form}
    body = {"model": MODEL, "max_tokens": 50, "messages": USER, **fields}

    answer = await stage.http.post("/v1/messages", json=body)

    words = f"{name}: the schema's keyword 'not' cannot be kept"
    assert answer.json()["error"]["message"] == words


async def test_too_long_an_answer_is_refused_in_words_that_tell_how_long(
    stage: Stage, client: anthropic.AsyncAnthropic
) -> None:
    """Claude Code reads the numbers, and asks again for less."""
    counted = await client.messages.count_tokens(model=MODEL, messages=USER)

    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(model=MODEL, max_tokens=100_000, messages=USER, timeout=10)

    words = "input length and `max_tokens` exceed context limit"
    assert f"{words}: {counted.input_tokens} + 100000 > 100000" in str(refused.value)


async def test_a_failure_amid_a_stream_is_an_error_event(stage: Stage) -> None:
    """The stream ends with it."""
    failure = pb.Failure(kind=pb.FAILURE_KIND_INTERNAL, message="broken")
    stage.plan("One two three four", fail_at=2, failure=failure)

    body = {"model": MODEL, "max_tokens": 50, "messages": USER, "stream": True}
    answer = await stage.http.post("/v1/messages", json=body)

    blocks = answer.text.strip().split("\n\n")
    name, data = blocks[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["type"] == "error"
    assert "message_stop" not in answer.text
    assert MESSAGES.keep_alive.startswith(b"event: ping\n")
