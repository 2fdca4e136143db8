"""Requests that must be refused: each has its status and error object within a second."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.config import GatewayConfig
from shared import farspan_pb2 as pb
from tests.services.gateway.stage import CHECKPOINT, MODEL, Stage, eventually, staged

HUGE = 10**30
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}
WORDS = "A word and another one. " * 12_000  # a quarter of a second to encode


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], **fields}


async def refused(stage: Stage, path: str, **request: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request, which must come within a second and reach no worker."""
    begun_s = time.monotonic()
    answer = await stage.http.post(path, **request)
    assert time.monotonic() - begun_s < 1
    assert not stage.fleet.submits
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status_code, error


BODIES = {
    b"{": "invalid_json",
    b"": "invalid_json",
    b"\xff\xfe": "invalid_json",
    b"[" * 100_000: "invalid_json",
    b'{"temperature": NaN}': "invalid_json",
    b'{"model": "\\ud800"}': "invalid_json",
    b'{"seed": ' + b"9" * 5000 + b"}": "invalid_json",
    b"[]": "invalid_type",
    b"null": "invalid_type",
}


async def test_a_malformed_body_is_refused(stage: Stage) -> None:
    """The client's JSON library, or its line, is broken."""
    for path in (CHAT, COMPLETIONS):
        for body, code in BODIES.items():
            status, error = await refused(stage, path, content=body)

            assert (status, error["code"]) == (400, code), body[:20]
            assert error["type"] == "invalid_request_error"


FIELDS = [
    ("model", None),
    ("model", 7),
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"role": "king", "content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": 7}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{**USER, "role": "assistant", "tool_calls": [{"function": {}}]}]),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
    ),
    (
        "messages",
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}],
            }
        ],
    ),
    (
        "messages",
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1e999}'}}],
            }
        ],
    ),
    (
        "messages",
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
            }
        ],
    ),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", HUGE),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_completion_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", HUGE),
    ("seed", 2**64),
    ("seed", "x"),
    ("stop", ["a"] * 17),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", "x" * 1001),
    ("stream", "yes"),
    ("stream_options", 3),
    ("n", 17),
    ("n", 0),
    ("logprobs", 1),
    ("top_logprobs", 5),
    ("frequency_penalty", 2.5),
    ("presence_penalty", -3),
    ("repetition_penalty", 0),
    ("min_p", 1.5),
    ("min_tokens", 2_000),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"999999": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [4096]),
    ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema"}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("prompt_logprobs", 1),
    ("store", True),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "retrieval"}]),
    ("chat_template_kwargs", {"messages": []}),
    ("reasoning_effort", 5),
]


async def test_a_wrong_field_of_a_chat_is_named(stage: Stage) -> None:
    """Wrong types, negative, huge and unsupported values: a client learns which one it was."""
    for name, value in FIELDS:
        body = chat(**{name: value})

        status, error = await refused(stage, CHAT, json=body)

        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", name), body


COMPLETION_FIELDS = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [1.5]),
    ("prompt", [-1]),
    ("prompt", [4096]),
    ("prompt", [HUGE]),
    ("prompt", ["a", ""]),
    ("prompt", [[1], []]),
    ("prompt", [[1], [4096]]),
    ("prompt", ["a"] * 129),
    ("n", 17),
    ("best_of", 2),
    ("echo", 1),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt_logprobs", 1),
    ("suffix", "x"),
]


async def test_a_wrong_field_of_a_completion_is_named(stage: Stage) -> None:
    """The same promise at the other endpoint."""
    for name, value in COMPLETION_FIELDS:
        body = {"model": MODEL, "prompt": "x", name: value}

        status, error = await refused(stage, COMPLETIONS, json=body)

        assert (status, error["param"]) == (400, name), body


async def test_defaults_and_nulls_and_unknown_fields_are_fine(stage: Stage) -> None:
    """Client libraries send every field they know."""
    stage.plan("x</think>y")
    harmless = {
        "n": 1,
        "logprobs": False,
        "response_format": {"type": "text"},
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "stop": None,
        "seed": None,
        "max_tokens": None,
        "stream_options": None,
        "temperature": 1,
        "user": "someone",
        "metadata": {"a": "b"},
        "never_heard_of": [1],
    }

    answer = await stage.http.post(CHAT, json=chat(**harmless))

    assert answer.status_code == 200


async def test_an_unknown_model_is_not_found(stage: Stage) -> None:
    """Another model is another server's."""
    status, error = await refused(stage, CHAT, json=chat(model="gpt-5"))

    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


_BAD: dict[str, Any] = {"not": {}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ("chat/completions", {"max_tokens": 10**6}, "max_tokens"),
        ("chat/completions", {"structured_outputs": {"json": _BAD}}, "structured_outputs"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": _BAD}}},
            "response_format",
        ),
        ("completions", {"structured_outputs": {"json": _BAD}}, "structured_outputs"),
        ("responses", {"max_output_tokens": 10**6}, "max_output_tokens"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": _BAD}}},
            "text.format",
        ),
    ],
)
async def test_an_error_names_the_field_that_was_sent(
    stage: Stage, path: str, fields: dict[str, Any], param: str
) -> None:
    """Not the one of another API."""
    prompts = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}
    prompt: Any = [{"role": "user", "content": "Hi"}] if path.startswith("chat") else "Hi"
    body = {"model": MODEL, prompts[path]: prompt, **fields}

    error = (await stage.http.post(f"/v1/{path}", json=body)).json()["error"]

    assert error["param"] == param
    assert "tokens" not in param or f"`{param}`" in error["message"]


async def test_what_can_never_fit_is_refused(nats_url: str) -> None:
    """Before anybody is bothered. Both roles hold prompt and answer: either may have to resume."""
    async with staged(nats_url, is_empty=True) as stage:
        await stage.fleet.add(pb.ROLE_PREFILL, "p0", max_sequence_tokens=60)
        await stage.fleet.add(pb.ROLE_DECODE, "d0", max_sequence_tokens=80)
        await stage.ready()

        def sized(num_tokens: int, max_tokens: int | None) -> dict[str, Any]:
            return {"model": MODEL, "prompt": [5] * num_tokens, "max_tokens": max_tokens}

        for body in (sized(60, 1), sized(40, 21), sized(100, None), sized(5, 2**31 - 1)):
            status, error = await refused(stage, COMPLETIONS, json=body)
            assert (status, error["code"]) == (400, "context_length_exceeded")
        stage.plan("One.")
        assert (await stage.http.post(COMPLETIONS, json=sized(40, 20))).status_code == 200
        models = await stage.client.models.list()
        assert models.data[0].model_dump()["max_model_len"] == 60


async def test_a_prompt_over_the_context_limit_is_refused_in_time(nats_url: str) -> None:
    """1.1 million token ids, though some worker claims to hold them."""
    async with staged(nats_url, is_empty=True) as stage:
        for role, name in ((pb.ROLE_PREFILL, "p0"), (pb.ROLE_DECODE, "d0")):
            await stage.fleet.add(role, name, max_sequence_tokens=2**31)
        await stage.ready()
        body = json.dumps({"model": MODEL, "prompt": [5] * 1_100_000}).encode()

        status, error = await refused(stage, COMPLETIONS, content=body)

        assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_a_text_far_over_the_fleet_s_limit_is_refused_in_time(nats_url: str) -> None:
    """Five megabytes would take ten seconds to encode."""
    message = {"role": "user", "content": "A word and another one. " * 200_000}
    async with staged(nats_url, is_empty=True) as stage:
        for role, name in ((pb.ROLE_PREFILL, "p0"), (pb.ROLE_DECODE, "d0")):
            await stage.fleet.add(role, name, max_sequence_tokens=10_000)
        await stage.ready()

        status, error = await refused(stage, CHAT, json=chat(messages=[message]))

        assert (status, error["code"]) == (400, "context_length_exceeded")


def asking(*messages: dict[str, Any]) -> dict[str, Any]:
    return chat(messages=list(messages))


def calling(arguments: Any, times: int = 1) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "tool_calls": [call] * times}


NUMBERED = {str(number): number for number in range(100_000)}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": NUMBERED}}
ENDLESS: dict[str, tuple[str, str | None, Callable[[], dict[str, Any]]]] = {
    "messages": (CHAT, "messages", lambda: asking(*[{**USER, "content": "a"}] * 30_000)),
    "parts": (CHAT, "messages", lambda: asking({**USER, "content": [{"type": "x"}] * 40_000})),
    "no parts": (CHAT, "messages", lambda: asking({**USER, "content": [1] * 2_600_000})),
    "wrong parts": (CHAT, "messages", lambda: asking({**USER, "content": [{}] * 16_000})),
    "calls": (CHAT, "messages", lambda: asking(calling({}, 20_000))),
    "arguments": (CHAT, "messages", lambda: asking(calling(NUMBERED))),
    "arguments in all": (CHAT, "messages", lambda: asking(calling({"a": [1] * 500}, 999))),
    "tools": (CHAT, "tools", lambda: chat(tools=[SCHEMA])),
    "template options": (
        CHAT,
        "chat_template_kwargs",
        lambda: chat(chat_template_kwargs=NUMBERED),
    ),
    "ids": (COMPLETIONS, "prompt", lambda: {"model": MODEL, "prompt": [5] * 2_600_000}),
    "no ids": (COMPLETIONS, "prompt", lambda: {"model": MODEL, "prompt": [0.5] * 2_000_000}),
    "unknown": (CHAT, None, lambda: chat(unknown=[{}] * 8_000_000)),
    "prompts": (COMPLETIONS, "prompt", lambda: {"model": MODEL, "prompt": ["a"] * 200_000}),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_what_is_endless_is_refused_in_time(stage: Stage, name: str) -> None:
    """Checking and rendering each of its parts would take many seconds."""
    path, param, fields = ENDLESS[name]
    body = json.dumps(fields()).encode()

    status, error = await refused(stage, path, content=body)

    assert (status, error["param"]) == (400, param)


async def test_workers_lost_while_a_prompt_is_read_do_not_make_it_too_long(nats_url: str) -> None:
    """The limit is what was true when the request came."""
    async with staged(nats_url, heartbeat_timeout_s=0.3) as stage:
        await stage.ready()
        fleet = stage.fleet
        fleet.place_failure = pb.Failure(kind=pb.FAILURE_KIND_WORKER_LOST, message="all gone")
        for worker in fleet.workers.values():
            worker.is_alive = False
        await asyncio.sleep(0.2)

        status, error = await refused(stage, COMPLETIONS, json={"model": MODEL, "prompt": WORDS})

        assert (status, error["code"]) == (503, "no_worker")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/v1/models"])
async def test_what_can_be_read_can_be_asked_for_without_its_body(stage: Stage, path: str) -> None:
    """Load balancers ask with HEAD."""
    answer = await stage.http.head(path)

    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_body_over_the_limit_is_cut_off_while_it_is_read(nats_url: str) -> None:
    """Memory is not the client's to fill; the length header may be missing or a lie."""

    async def endless() -> Any:
        for _ in range(1000):
            yield b"x" * 1000

    async with staged(nats_url, max_body_bytes=10_000) as stage:
        answer = await stage.http.post(CHAT, content=endless())

        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


async def test_unknown_routes_and_methods_answer_with_error_objects(stage: Stage) -> None:
    """Even a wrong address gets what an OpenAI client can read."""
    missing = await stage.http.get("/v1/nothing")
    wrong = await stage.http.get(CHAT)
    wrong_too = await stage.http.post("/v1/models")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    for answer in (wrong, wrong_too):
        assert answer.status_code == 405
        assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_no_worker_is_said_at_once(nats_url: str) -> None:
    """Nobody waits for a fleet that is not there."""
    async with staged(nats_url, is_empty=True) as stage:
        status, error = await refused(stage, CHAT, json=chat())

        assert (status, error["type"]) == (503, "server_error")
        assert "no ready prefill" in error["message"]


async def test_a_full_fleet_says_when_to_come_back(stage: Stage) -> None:
    """429 means capacity exists, only not now."""
    stage.fleet.place_failure = pb.Failure(
        kind=pb.FAILURE_KIND_OVERLOADED, message="all queues are full", retry_after_ms=2500
    )

    answer = await stage.complete()

    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["type"] == "rate_limit_exceeded"


async def test_a_senseless_time_limit_is_refused(stage: Stage) -> None:
    """The header is the client's own deadline."""
    for text in ("0", "-1", "soon", "nan"):
        body, headers = {"model": MODEL, "prompt": "x"}, {"x-request-timeout-s": text}

        status, error = await refused(stage, COMPLETIONS, json=body, headers=headers)

        assert (status, error["code"]) == (400, "invalid_value"), text


async def test_the_client_s_deadline_ends_the_request(stage: Stage) -> None:
    """Before any token: 504, and both workers know."""
    stage.plan("One two.", hold_at=0)
    begun_s = time.monotonic()

    answer = await stage.http.post(
        COMPLETIONS,
        json={"model": MODEL, "prompt": "x"},
        headers={"x-request-timeout-s": "0.4"},
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - begun_s < 1.5
    await eventually(lambda: len(stage.fleet.cancels) == 2)
    await eventually(lambda: len(stage.fleet.ended) == 1)


async def test_an_error_inside_a_stream_is_an_event_without_an_end_marker(stage: Stage) -> None:
    """The status is out already; a client must not take the text for whole."""
    stage.plan(
        "One two three",
        fail_at=2,
        failure=pb.Failure(kind=pb.FAILURE_KIND_INTERNAL, message="a bug"),
    )

    answer = await stage.complete(stream=True)

    blocks = [block for block in answer.text.split("\n\n") if block]
    assert json.loads(blocks[-1].removeprefix("data: "))["error"]["message"] == "a bug"
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_client_that_leaves_is_noticed_in_every_state(
    stage: Stage, is_stream: bool, hold_at: int
) -> None:
    """Before the first token and after it, streaming or not: one cancel each, within a second."""
    stage.plan("One two three", hold_at=hold_at)
    asking = asyncio.create_task(stage.complete(stream=is_stream))
    await eventually(lambda: len(stage.fleet.submits) == 1)
    await asyncio.sleep(0.1)

    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    assert await eventually(lambda: len(stage.fleet.ended) == 1) < 1
    request_id = stage.fleet.submits[0].request_id
    await asyncio.sleep(0.1)
    assert sorted(stage.fleet.cancels) == [("d0", request_id), ("p0", request_id)]


async def test_a_client_that_leaves_while_sending_disturbs_nobody(stage: Stage) -> None:
    """Half a body is no request."""
    address = stage.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(address[0], int(address[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    stage.plan("One.")

    assert (await stage.complete()).status_code == 200
    assert len(stage.fleet.places) == 1


async def test_a_request_is_one_trace(nats_url: str, tmp_path: Any) -> None:
    """From the client's own span to the last byte, with the figures where dashboards look."""
    from shared import telemetry

    trace_file = tmp_path / "trace.jsonl"
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with telemetry.configure("gateway", trace_file=trace_file):
        async with staged(nats_url) as stage:
            stage.plan("One two.", cached_tokens=1)
            await stage.http.post(
                COMPLETIONS, json={"model": MODEL, "prompt": "x"}, headers={"traceparent": parent}
            )
    spans = {span["name"]: span for span in map(json.loads, trace_file.read_text().splitlines())}

    root = spans[f"text_completion {MODEL}"]
    assert root["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert root["parent_id"] == "b7ad6b7169203331"
    children = {"gateway.place", "gateway.submit", "gateway.first_token", "gateway.stream"}
    assert children <= spans.keys()
    assert {spans[name]["parent_id"] for name in children} == {root["span_id"]}
    assert all(spans[name]["end_ns"] <= root["end_ns"] for name in children)
    assert root["attributes"]["gen_ai.usage.cache_read.input_tokens"] == 1
    assert root["attributes"]["gen_ai.response.finish_reasons"] == ["stop"]


def test_settings_are_checked() -> None:
    """A subject token and positive bounds."""
    for wrong in ({"id": "a.b"}, {"deadline_s": 0.0}):
        with pytest.raises(ValueError, match=r"id|deadline_s"):
            GatewayConfig("127.0.0.1", 0, "nats://x", CHECKPOINT, **wrong)  # type: ignore[arg-type]
