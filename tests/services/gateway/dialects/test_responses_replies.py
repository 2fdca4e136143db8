"""What clients of the Responses API are told: streams and whole responses are the same."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.ask import Json
from services.gateway.dialects.dialect import Ending, Event, Opening
from services.gateway.dialects.responses_replies import ResponsesReplies
from services.gateway.dialects.sealed import unseal
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta, LikelyToken, TokenLogprob
from services.gateway.text.glm import Content, Part, Reasoning, ToolCall
from shared import farspan_pb2 as pb
from tests.services.gateway.stage import MODEL, Stage

USAGE = Usage(prompt_tokens=20, cached_tokens=8, completion_tokens=5, reasoning_tokens=2)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather now.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
STOP = Ending(pb.FINISH_REASON_STOP)
TEXTS = st.text(min_size=1, max_size=4)
PARTS = st.one_of(
    TEXTS.map(Reasoning),
    TEXTS.map(Content),
    TEXTS.map(lambda text: ToolCall("get", json.dumps({"x": text}))),
)


def fresh(*, seals_reasoning: bool = False) -> ResponsesReplies:
    namespaces = {"agents.stop": ("agents", "stop")}
    return ResponsesReplies("m", {"tools": []}, namespaces, seals_reasoning=seals_reasoning)


def play(
    parts: list[Part], ending: Ending = STOP, *, seals_reasoning: bool = False
) -> tuple[list[Event], Json]:
    """A whole answer's events, and its response."""
    replies = fresh(seals_reasoning=seals_reasoning)
    events = replies.begin(Opening(Usage(20, 8)))
    for part in parts:
        events += replies.feed(0, Delta([part]))
    events += replies.finish(0, ending) + replies.end(USAGE)
    return events, replies.whole(USAGE)


def assembled(events: list[Event]) -> list[Json]:
    """The output items as a client puts them together; asserts the protocol's order on the way."""
    items: list[Json] = []
    for number, event in enumerate(events):
        assert (event.data["type"], event.data["sequence_number"]) == (event.name, number)
        kind = event.name.removeprefix("response.")
        if kind == "output_item.added":
            items.append(json.loads(json.dumps(event.data["item"])))
        if "output_index" in event.data:
            assert event.data["output_index"] == len(items) - 1
            advance(items[-1], kind, event.data)
    return items


def advance(item: Json, kind: str, data: Json) -> None:
    """Take one event into the item it is about."""
    match kind:
        case "content_part.added":
            item["content"].append(json.loads(json.dumps(data["part"])))
        case "output_text.delta" | "reasoning_text.delta":
            item["content"][0]["text"] += data["delta"]
        case "function_call_arguments.delta":
            item["arguments"] += data["delta"]
        case "output_text.done" | "reasoning_text.done":
            assert item["content"][0]["text"] == data["text"]
        case "function_call_arguments.done":
            assert item["arguments"] == data["arguments"]
        case "content_part.done":
            assert item["content"][0] == data["part"]
        case "output_item.done":
            done = data["item"]
            item.update(
                {name: done[name] for name in ("status", "encrypted_content") if name in done}
            )
            assert item == done


@settings(max_examples=50)
@given(st.lists(PARTS, max_size=8), st.sampled_from([STOP, Ending(pb.FINISH_REASON_LENGTH)]))
def test_a_stream_adds_up_to_the_whole(parts: list[Part], ending: Ending) -> None:
    """Whatever comes after whatever, and however it ends."""
    events, whole = play(parts, ending, seals_reasoning=True)

    assert [event.name for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].name == f"response.{whole['status']}"
    assert events[-1].data["response"] == whole
    assert assembled(events) == whole["output"]


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

    for response in (whole, cut):
        for item in response["output"]:
            item.pop("id")
            item.pop("call_id", None)
    assert whole["output"] == cut["output"]


def test_an_answer_that_was_cut_is_incomplete() -> None:
    """Its last item too."""
    _, whole = play([Content("x"), Reasoning("y")], Ending(pb.FINISH_REASON_LENGTH))

    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]


def test_reasoning_is_sealed_for_who_asks() -> None:
    """Clients that store nothing here carry it to the next turn."""
    _, sealed = play([Reasoning("deep"), Reasoning(" thought")], seals_reasoning=True)
    _, plain = play([Reasoning("deep thought")])

    assert unseal(sealed["output"][0]["encrypted_content"]) == "deep thought"
    assert plain["output"][0]["encrypted_content"] is None
    assert plain["output"][0]["content"] == [{"type": "reasoning_text", "text": "deep thought"}]


def test_a_call_of_a_namespaced_tool_names_the_namespace() -> None:
    """Codex finds its own tools by it."""
    _, whole = play([ToolCall("agents.stop", "{}")])

    assert (whole["output"][0]["namespace"], whole["output"][0]["name"]) == ("agents", "stop")


def logprob(token: str) -> TokenLogprob:
    data = token.encode()
    return TokenLogprob(token, data, -0.5, (LikelyToken(token, data, -0.5),))


@pytest.mark.parametrize("is_batched", [True, False])
def test_logprobs_are_those_of_the_text(is_batched: bool) -> None:
    """Not of the reasoning, nor of calls; the text may come later than its tokens."""
    tokens = [logprob(token) for token in ("a", "</think>", "b", "c", "<tool_call>", "d")]
    deltas = [
        Delta([Reasoning("a")], tokens[:1]),
        Delta([], tokens[1:3]),
        Delta([Content("bc")], tokens[3:4]),
        Delta([], tokens[4:]),
    ]
    if is_batched:
        deltas = [Delta([Reasoning("a"), Content("bc")], tokens)]
    replies = fresh()

    for delta in deltas:
        replies.feed(0, delta)
    replies.finish(0, STOP)

    (part,) = replies.whole(USAGE)["output"][1]["content"]
    assert [each["token"] for each in part["logprobs"]] == ["b", "c"]
    assert part["logprobs"][0]["top_logprobs"][0]["bytes"] == [98]


# ---------------------------------------------------------- the SDK


def without_ids(response: Any) -> Json:
    """What two answers to one request have in common."""
    told: Json = response.model_dump(
        exclude={"id", "created_at", "completed_at"}, exclude_none=True
    )
    for item in told["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
    return told


async def test_the_sdk_reads_a_stream_as_it_reads_the_whole(stage: Stage) -> None:
    """With reasoning, text and two calls."""
    stage.plan(f"The user asks.</think>I look.{CALL}{CALL}", cached_tokens=7)
    request: Any = {"model": MODEL, "input": "The weather?", "tools": [WEATHER]}

    whole = await stage.client.responses.create(**request)
    async with stage.client.responses.stream(**request) as stream:
        names = [event.type async for event in stream]
        streamed = await stream.get_final_response()

    assert without_ids(streamed) == without_ids(whole)
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "I look."
    assert names[0] == "response.created" and names[-1] == "response.completed"
    assert whole.usage is not None
    assert whole.usage.input_tokens == len(stage.fleet.submits[0].token_ids) // 4
    assert whole.usage.input_tokens_details.cached_tokens == 7
    assert whole.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_the_model_sees_its_calls_and_their_results(stage: Stage, is_sealed: bool) -> None:
    """What the client gives back is what the model wrote: the prompt goes on where it ended."""
    first = stage.plan(f"I call it.</think>{CALL}")
    request: Any = {"model": MODEL, "tools": [WEATHER], "store": False}
    if is_sealed:
        request["include"] = ["reasoning.encrypted_content"]
    answer = await stage.client.responses.create(input="The weather?", **request)
    given = [item.model_dump(exclude_none=True) for item in answer.output]
    if is_sealed:
        del given[0]["content"]  # as Codex does
    call = answer.output[1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}

    stage.plan("Rain.</think>It rains.")
    await stage.client.responses.create(
        input=[{"role": "user", "content": "The weather?"}, *given, result], **request
    )

    before, after = (
        stage.tokenizer.decode(ids(submit), skips_special=False) for submit in stage.fleet.submits
    )
    written = stage.tokenizer.decode(first.answer[:-1], skips_special=False)
    assert after.startswith(before + written)
    assert "<tool_response>It rains.</tool_response>" in after


def ids(submit: pb.Submit) -> list[int]:
    data = submit.token_ids
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


async def test_refusals_are_the_sdk_s_exceptions(stage: Stage) -> None:
    """With the words that say what is wrong."""
    with pytest.raises(openai.NotFoundError):
        await stage.client.responses.create(model="gpt-5", input="x")
    with pytest.raises(openai.BadRequestError) as stored:
        await stage.client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")

    assert stored.value.param == "previous_response_id"
    assert not stage.fleet.submits


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_failure_amid_a_stream_ends_it_as_failed(stage: Stage, num_tokens: int) -> None:
    """The error by itself for SDKs, the failed response for Codex; at any point."""
    failure = pb.Failure(kind=pb.FAILURE_KIND_INTERNAL, message="broken")
    stage.plan("One two three four", fail_at=num_tokens, failure=failure)

    body = {"model": MODEL, "input": "x", "stream": True}
    answer = await stage.http.post("/v1/responses", json=body)

    documents = [
        json.loads(block.split("\ndata: ")[1]) for block in answer.text.strip().split("\n\n")
    ]
    numbers = [document["sequence_number"] for document in documents]
    assert numbers == list(range(len(documents)))
    assert documents[0]["type"] == "response.created"
    assert [document["type"] for document in documents[-2:]] == ["error", "response.failed"]
    assert documents[-1]["response"]["error"]["code"] == "server_error"
    assert documents[-1]["response"]["status"] == "failed"
