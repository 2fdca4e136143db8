"""The public API through the front door: the openai client and plain HTTP against a fake fleet."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from services.gateway.app import serve
from services.gateway.config import GatewayConfig
from shared import bus, subjects
from shared import farspan_pb2 as pb
from shared.block_hash import block_hashes, namespace, pack, token_ids
from shared.errors import ConfigError
from tests.fakes import FakeFleet, Plan
from tests.services.gateway.stage import (
    CHECKPOINT,
    MODEL,
    TOKENIZER,
    Stage,
    eventually,
    staged,
)

USER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"


def events(response: httpx.Response) -> list[str]:
    """The data of each event of a stream."""
    blocks = response.text.split("\n\n")
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


def documents(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event but the last, which is the end marker."""
    assert events(response)[-1] == "[DONE]"
    return [json.loads(event) for event in events(response)[:-1]]


# ---------------------------------------------------------- answers


async def test_a_chat_is_answered_with_reasoning_apart(stage: Stage) -> None:
    """The model thinks first; a client shows that differently or not at all."""
    plan = stage.plan("The user asks.</think>It rains.", cached_tokens=7)

    answer = await stage.client.chat.completions.create(model=MODEL, messages=USER)

    message = answer.choices[0].message
    assert message.content == "It rains."
    assert message.model_dump()["reasoning_content"] == "The user asks."
    assert message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(plan.answer)
    assert answer.usage.prompt_tokens == len(stage.fleet.submits[0].token_ids) // 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


async def test_a_streamed_chat_says_the_same_as_a_whole_one(stage: Stage) -> None:
    """Streaming changes when, never what."""
    stage.plan("Thought 한국.</think>Answer 🙂.")

    stream = await stage.client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.role for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == "Answer 🙂."
    thought = "".join(delta.model_dump().get("reasoning_content") or "" for delta in deltas)
    assert thought == "Thought 한국."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_is_streamed_only_to_who_asked(stage: Stage) -> None:
    """Clients that add up all usage objects would count twice."""
    stage.plan("One two.")

    for options in (None, {}, {"include_usage": False}):
        answer = await stage.complete(stream=True, stream_options=options)

        assert all("usage" not in document for document in documents(answer))


async def test_a_stream_has_the_headers_proxies_need(stage: Stage) -> None:
    """Buffering proxies would turn a stream into a wait."""
    stage.plan("One.")

    answer = await stage.complete(stream=True)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"]


async def test_tokens_reach_the_client_before_the_answer_ends(stage: Stage) -> None:
    """True streaming: the first word arrives while the worker still works."""
    stage.plan("One two three four", hold_at=2)
    received: list[str] = []

    async def read() -> None:
        stream = await stage.client.completions.create(model=MODEL, prompt="x", stream=True)
        async for chunk in stream:
            received.append(chunk.choices[0].text)

    reading = asyncio.create_task(read())
    await eventually(lambda: len("".join(received)) > 0)
    assert "four" not in "".join(received)
    stage.fleet.release()
    await reading
    assert "".join(received) == "One two three four"


async def test_a_tool_call_is_given_in_the_api_s_form(stage: Stage) -> None:
    """Agents run what they find there."""
    stage.plan(f"I call it.</think>{CALL}")

    answer = await stage.client.chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER])

    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


async def test_a_streamed_tool_call_is_the_same(stage: Stage) -> None:
    """Two calls have two indices."""
    stage.plan(f"x</think>{CALL}{CALL}")

    stream = await stage.client.chat.completions.create(
        model=MODEL, messages=USER, tools=[WEATHER], stream=True
    )
    chunks = [chunk async for chunk in stream]

    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_without_a_choice_of_tools_a_call_is_text(stage: Stage) -> None:
    """`tool_choice: none` promises that nothing is called."""
    stage.plan(f"x</think>{CALL}")

    answer = await stage.client.chat.completions.create(
        model=MODEL, messages=USER, tools=[WEATHER], tool_choice="none"
    )

    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"


async def test_a_tool_s_result_goes_back_into_the_prompt(stage: Stage) -> None:
    """The second turn of every agent."""
    stage.plan("x</think>Rain.")
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": call}],
    }
    messages: Any = [*USER, asked, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]

    await stage.client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])

    prompt = stage.tokenizer.encode(
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        "<|observation|><tool_response>rain</tool_response><|assistant|><think>"
    )
    assert token_ids(stage.fleet.submits[0].token_ids)[-len(prompt) :] == prompt


async def test_thinking_can_be_switched_off(stage: Stage) -> None:
    """Then the prompt ends the thought, and all text is answer."""
    stage.plan("It rains.")

    answer = await stage.client.chat.completions.create(
        model=MODEL,
        messages=USER,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )

    assert answer.choices[0].message.content == "It rains."


async def test_a_completion_takes_text_or_token_ids(stage: Stage) -> None:
    """Benchmarks send ids, people send text."""
    stage.plan(" upon a time")
    ids = stage.tokenizer.encode("Once")

    answers = [await stage.complete(prompt=prompt) for prompt in ("Once", ids, ["Once"])]

    assert [answer.json()["choices"][0]["text"] for answer in answers] == [" upon a time"] * 3
    assert {submit.token_ids for submit in stage.fleet.submits} == {
        stage.fleet.submits[0].token_ids
    }
    assert token_ids(stage.fleet.submits[0].token_ids) == ids


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_stop_string_ends_the_answer_unseen(stage: Stage, is_stream: bool) -> None:
    """Whatever the worker computed past it is cancelled, and nobody pays for it."""
    plan = stage.plan("One two three four five", hold_at=5, cached_tokens=1)
    wanted = len(stage.tokenizer.encode("One two three"))

    answer = await stage.complete(
        stop=["zzz", " three"], stream=is_stream, stream_options={"include_usage": True}
    )

    parts = documents(answer) if is_stream else [answer.json()]
    assert "".join(choice["text"] for part in parts for choice in part["choices"]) == "One two"
    assert parts[-1]["usage"]["completion_tokens"] == wanted < len(plan.answer)
    assert parts[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    await eventually(lambda: len(stage.fleet.cancels) == 2)


async def test_the_length_limit_is_told(stage: Stage) -> None:
    """`length` tells the client that there was more."""
    stage.plan("One two three four five")

    answer = await stage.complete(max_tokens=2)

    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 2


# ---------------------------------------------------------- what workers get


async def test_workers_get_the_client_s_sampling(stage: Stage) -> None:
    """Everything that changes tokens travels with the request."""
    stage.plan("One.")

    await stage.complete(
        temperature=0, top_p=0.5, top_k=7, seed=-1, max_tokens=9, ignore_eos=True, user="ignored"
    )

    sampling = stage.fleet.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 7)
    assert (sampling.seed, sampling.max_new_tokens) == (2**64 - 1, 9)
    assert list(sampling.stop_token_ids) == []


async def test_a_silent_client_gets_the_checkpoint_s_sampling(stage: Stage) -> None:
    """And a seed of its own each time."""
    stage.plan("One.")

    for _ in range(2):
        await stage.complete()

    first, second = (submit.sampling for submit in stage.fleet.submits)
    assert (round(first.temperature, 3), round(first.top_p, 3), first.top_k) == (0.6, 0.9, 0)
    assert list(first.stop_token_ids) == [4076, 4083, 4085]
    assert first.max_new_tokens == 1024
    assert first.seed != second.seed


async def test_block_hashes_are_those_of_the_model_s_revision_and_salt(stage: Stage) -> None:
    """Tenants with different salts never share a block."""
    stage.plan("One.")
    ids = list(range(100, 100 + 130))

    await stage.complete(prompt=ids, cache_salt="tenant")

    expected = pack(block_hashes(namespace(MODEL, "f1", "tenant"), ids))
    assert len(expected) == 32
    assert stage.fleet.places[0].block_hashes == stage.fleet.submits[0].block_hashes == expected


async def test_a_silent_client_s_answer_is_bounded_by_what_fits(nats_url: str) -> None:
    """A default that does not fit must not fail the request."""
    async with staged(nats_url, is_empty=True) as stage:
        await stage.fleet.add(pb.ROLE_PREFILL, "p0", max_sequence_tokens=60)
        await stage.fleet.add(pb.ROLE_DECODE, "d0", max_sequence_tokens=50)
        await stage.ready()
        stage.plan("One.")

        answer = await stage.complete(prompt=[5] * 40)

        assert answer.status_code == 200
        assert stage.fleet.submits[0].sampling.max_new_tokens == 10


# ---------------------------------------------------------- other routes


async def test_models_are_listed(stage: Stage) -> None:
    """Clients look for the name there."""
    listed = await stage.client.models.list()

    assert [model.id for model in listed.data] == [MODEL]
    assert (await stage.client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await stage.client.models.retrieve("other")


async def test_a_gateway_says_that_it_lives_and_names_itself_in_what_it_places(
    nats_url: str,
) -> None:
    """Else the routers would end its promises; and after its death they could not."""
    alive: list[str] = []
    placed: list[str] = []

    async def hear(message: pb.GatewayAlive) -> None:
        alive.append(message.gateway_id)

    async with (
        bus.connect(nats_url, "test") as link,
        link.listen(subjects.GATEWAY_ALIVE, hear),
        staged(nats_url, id="g-of-this-test") as stage,
    ):
        stage.plan("Once")
        await stage.complete()
        placed += [request.gateway_id for request in stage.fleet.places]
        await eventually(lambda: alive.count("g-of-this-test") > 1)

    assert placed == ["g-of-this-test"]


async def test_readiness_follows_the_fleet(nats_url: str) -> None:
    """A gateway without workers is alive and not ready, and says why."""
    async with staged(nats_url, is_empty=True, heartbeat_timeout_s=0.5) as stage:

        async def is_ready() -> tuple[int, str]:
            answer = await stage.http.get("/readyz")
            assert (await stage.http.get("/startupz")).status_code == answer.status_code
            return answer.status_code, answer.json()["reason"]

        assert (await stage.http.get("/livez")).status_code == 200
        await asyncio.sleep(0.3)
        assert await is_ready() == (503, "no ready prefill and no ready decode worker")
        await stage.fleet.add(pb.ROLE_PREFILL, "p0")
        await asyncio.sleep(0.3)
        assert await is_ready() == (503, "no ready decode worker")
        await stage.fleet.add(pb.ROLE_DECODE, "d0")
        await asyncio.sleep(0.3)
        assert await is_ready() == (200, "ready")
        assert (await stage.http.get("/health")).status_code == 200
        stage.fleet.workers["d0"].is_alive = False
        await asyncio.sleep(1.0)
        assert await is_ready() == (503, "no ready decode worker")


async def test_a_harmless_request_id_is_echoed_and_others_replaced(stage: Stage) -> None:
    """An id ends up in logs and headers: it must not carry anything else there."""
    kept = await stage.http.get("/livez", headers={"x-request-id": "job-17.a"})
    replaced = await stage.http.get("/livez", headers={"x-request-id": "a b\tc;{}"})

    assert kept.headers["x-request-id"] == "job-17.a"
    assert replaced.headers["x-request-id"] not in ("", "a b\tc;{}")


async def test_two_live_requests_with_one_client_id_both_succeed(stage: Stage) -> None:
    """Clients repeat ids; the system's own are unique."""
    stage.plan("One two.", hold_at=1)
    headers = {"x-request-id": "same"}
    body = {"model": MODEL, "prompt": "x"}

    posts = [stage.http.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    both = asyncio.gather(*posts)
    await eventually(lambda: len(stage.fleet.submits) == 2)
    stage.fleet.release()

    assert [answer.json()["choices"][0]["text"] for answer in await both] == ["One two."] * 2
    assert len({submit.request_id for submit in stage.fleet.submits}) == 2


# ---------------------------------------------------------- start and stop


async def test_leaving_finishes_what_is_in_flight(nats_url: str) -> None:
    """A rolling restart must not cut answers."""
    async with staged(nats_url, drain_s=5.0) as stage:
        stage.plan("One two.", hold_at=1)
        answering = asyncio.create_task(stage.complete())
        await eventually(lambda: len(stage.fleet.submits) == 1)
        asyncio.get_running_loop().call_later(0.3, stage.fleet.release)
        answer = await answering

    assert answer.json()["choices"][0]["text"] == "One two."


async def test_what_outlasts_the_drain_ends_with_an_error_and_is_cancelled_at_the_workers(
    nats_url: str,
) -> None:
    """Clients are told to come again, and no worker computes for nobody."""
    config = GatewayConfig("127.0.0.1", 0, nats_url, CHECKPOINT, model=MODEL, drain_s=1.0)
    plans = [Plan(TOKENIZER.encode("One two."), hold_at=1) for _ in range(12)]
    async with (
        bus.connect(nats_url, "fakes") as connection,
        FakeFleet(connection, MODEL, plans).running() as fleet,
    ):
        await fleet.add_pair()
        async with serve(config) as serving:
            await eventually(lambda: serving.readiness.read()[0])
            http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{serving.port}", timeout=10)
            streams, wholes = (
                [asyncio.create_task(_post(http, is_stream)) for _ in range(count)]
                for is_stream, count in ((True, 8), (False, 4))
            )
            await eventually(lambda: len(fleet.submits) == 12)
            begun_s = time.monotonic()
        took_s = time.monotonic() - begun_s
        answers = await asyncio.gather(*streams, *wholes)
        await http.aclose()

        await eventually(lambda: len(fleet.cancels) == 24)
        await eventually(lambda: len(fleet.ended) == 12)
        assert not serving.readiness.read()[0]
    assert took_s < 3.0
    for answer in answers[:8]:
        *_, last = answer.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert "[DONE]" not in answer.text
    for answer in answers[8:]:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "shutting_down"


async def test_a_second_wish_to_stop_ends_the_drain_with_the_same_error(nats_url: str) -> None:
    """Ctrl-C twice means now; what a client is told stays true."""
    config = GatewayConfig("127.0.0.1", 0, nats_url, CHECKPOINT, model=MODEL, drain_s=60.0)
    async with (
        bus.connect(nats_url, "fakes") as connection,
        FakeFleet(
            connection, MODEL, [Plan(TOKENIZER.encode("One."), hold_at=1)]
        ).running() as fleet,
    ):
        await fleet.add_pair()
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stopping = asyncio.Event()

        async def process() -> None:
            async with serve(config) as serving:
                await eventually(lambda: serving.readiness.read()[0])
                port.set_result(serving.port)
                await stopping.wait()

        running = asyncio.create_task(process())
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{await port}", timeout=10)
        answering = asyncio.create_task(_post(http, is_stream=False))
        await eventually(lambda: len(fleet.submits) == 1)
        stopping.set()
        await asyncio.sleep(0.3)
        assert not running.done()
        running.cancel()

        answer = await answering
        await asyncio.gather(running, return_exceptions=True)
        await http.aclose()

        await eventually(lambda: len(fleet.cancels) == 2)
    assert answer.json()["error"]["code"] == "shutting_down"


async def _post(http: httpx.AsyncClient, is_stream: bool) -> httpx.Response:
    return await http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": is_stream}
    )


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"nats_url": "nats://127.0.0.1:1"}, "NATS"),
        ({"checkpoint": Path("/nowhere")}, "/nowhere"),
        ({"port": "taken"}, "cannot listen"),
    ],
)
async def test_what_is_missing_at_the_start_is_named(
    nats_url: str, settings: dict[str, Any], complaint: str
) -> None:
    """The operator reads one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"port": 0, "nats_url": nats_url, "checkpoint": CHECKPOINT, **settings}
        if given["port"] == "taken":
            given["port"] = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=complaint):
            async with serve(GatewayConfig(host="127.0.0.1", **given)):
                pass


async def test_a_probe_waits_for_no_body(stage: Stage) -> None:
    """It needs no key, so nothing that comes with it is read, and the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.serving.port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")

    async with asyncio.timeout(5):
        told = await reader.read()
    writer.close()

    assert told.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in told.lower()


async def test_anthropic_s_client_lists_the_model(stage: Stage) -> None:
    """It reads other fields of the same document."""
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key="none") as client:
        (model,) = (await client.models.list()).data

    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.created_at.year >= 2024
