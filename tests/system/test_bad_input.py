"""What must be refused, asked of the whole stack: a defined answer at once, and nothing held.

The gateway's own tests try every field against a fake fleet; here each kind meets real workers.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.local.stack import Stack
from tests.system.watch import Watch, watching

CHAT, COMPLETIONS, RESPONSES = "/chat/completions", "/completions", "/responses"
HUGE = 10**30
MOST_TOKENS = 2048  # of prompt and answer: prefill's pool on the small stack, decode's is larger
CONTEXT = 1 << 20  # of the model
USER = {"role": "user", "content": "What does river mean?"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo-fp8", "messages": [USER], "max_tokens": 60, "temperature": 0, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo-fp8", "prompt": "A river", "max_tokens": 4, **fields}


@dataclass(frozen=True)
class Bad:
    """A request and its refusal."""

    path: str
    body: dict[str, Any] | bytes
    code: str
    status: int = 400


BAD = {
    "malformed JSON": Bad(CHAT, b'{"model": "demo-fp8", "messages": [', "invalid_json"),
    "an empty body": Bad(COMPLETIONS, b"", "invalid_json"),
    "not UTF-8": Bad(CHAT, b"\xff\xfe{}", "invalid_json"),
    "not an object": Bad(CHAT, b"[]", "invalid_type"),
    "nesting without end": Bad(CHAT, b"[" * 100_000, "invalid_json"),
    "no messages": Bad(CHAT, {"model": "demo-fp8"}, "missing_required_parameter"),
    "empty messages": Bad(CHAT, chat(messages=[]), "invalid_value"),
    "messages of a wrong type": Bad(CHAT, chat(messages="hi"), "invalid_value"),
    "an unknown role": Bad(
        CHAT, chat(messages=[{"role": "king", "content": "x"}]), "invalid_value"
    ),
    "content of a wrong type": Bad(
        CHAT, chat(messages=[{"role": "user", "content": 7}]), "invalid_value"
    ),
    "an empty prompt": Bad(COMPLETIONS, completion(prompt=""), "invalid_value"),
    "a token id that is none": Bad(COMPLETIONS, completion(prompt=[1, 10**6]), "invalid_value"),
    "a negative token id": Bad(COMPLETIONS, completion(prompt=[1, -1]), "invalid_value"),
    "an unknown model": Bad(CHAT, chat(model="gpt-5"), "model_not_found", 404),
    "a negative max_tokens": Bad(CHAT, chat(max_tokens=-1), "invalid_value"),
    "no max_tokens": Bad(CHAT, chat(max_tokens=0), "invalid_value"),
    "a huge max_tokens": Bad(CHAT, chat(max_tokens=HUGE), "invalid_value"),
    "a max_tokens in words": Bad(CHAT, chat(max_tokens="five"), "invalid_value"),
    "a negative temperature": Bad(CHAT, chat(temperature=-1), "invalid_value"),
    "a huge temperature": Bad(CHAT, chat(temperature=HUGE), "invalid_value"),
    "an infinite temperature": Bad(
        CHAT, b'{"model": "demo-fp8", "temperature": Infinity}', "invalid_json"
    ),
    "a huge seed": Bad(CHAT, chat(seed=HUGE), "invalid_value"),
    "what is not served": Bad(CHAT, chat(audio={}), "unsupported_value"),
    "more tokens than the model": Bad(
        COMPLETIONS, completion(prompt=[5] * (CONTEXT + 1)), "context_length_exceeded"
    ),
    "a text longer than the model's context": Bad(
        CHAT,
        chat(messages=[{"role": "user", "content": "A word. " * 10**6}]),
        "context_length_exceeded",
    ),
    "a prompt that no worker could hold": Bad(
        COMPLETIONS, completion(prompt=[5] * MOST_TOKENS), "context_length_exceeded"
    ),
    "an answer that no worker could hold": Bad(
        COMPLETIONS,
        completion(prompt=[5] * 2000, max_tokens=MOST_TOKENS - 1999),
        "context_length_exceeded",
    ),
    "millions of items": Bad(
        RESPONSES,
        b'{"model": "demo-fp8", "input": [' + b"{}," * 10**6 + b"{}]}",
        "invalid_value",
    ),
    "an answer that was never stored": Bad(
        RESPONSES,
        {"model": "demo-fp8", "input": "x", "previous_response_id": "resp_1"},
        "unsupported_value",
    ),
    "a body over the limit": Bad(CHAT, b" " * (33 << 20), "request_too_large", 413),
}


@pytest_asyncio.fixture
async def http(small_stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=small_stack.base_url, timeout=30) as made:
        yield made


@pytest_asyncio.fixture
async def watch(small_stack: Stack) -> AsyncIterator[Watch]:
    async with watching(small_stack) as made:
        yield made


async def check_well(http: httpx.AsyncClient, watch: Watch) -> None:
    """Nothing is held, and an ordinary request is served as ever."""
    await watch.pools_at_base()
    answer = await http.post(CHAT, json=chat())
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == (
        "river (noun): a large natural stream of water (larger than a creek)."
    )
    await watch.pools_at_base()


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
    """The answer to a body that is JSON, or is not."""
    if isinstance(body, dict):
        return await http.post(path, json=body)
    return await http.post(path, content=body)


async def test_bad_requests_get_an_error_object_at_once(
    http: httpx.AsyncClient, watch: Watch
) -> None:
    """Streams too: a refusal is never a 200 with an error inside."""
    for name, bad in BAD.items():
        bodies = [bad.body, bad.body]
        if isinstance(bad.body, dict):
            bodies[1] = {**bad.body, "stream": True}
        elapsed_s = []
        for body in bodies:
            begun_s = time.monotonic()
            answer = await post(http, bad.path, body)
            elapsed_s.append(time.monotonic() - begun_s)

            assert "error" in answer.json(), name
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (bad.status, bad.code), name
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error" and error["message"]
            assert answer.headers["content-type"] == "application/json"
        assert min(elapsed_s) < 1, f"{name} took {elapsed_s}"

    assert not watch.submits
    await check_well(http, watch)


async def test_the_longest_request_that_fits_is_served(
    http: httpx.AsyncClient, watch: Watch
) -> None:
    """The limits are where they are said to be; one token more was refused above."""
    models = (await http.get("/models")).json()["data"]
    assert models[0]["max_model_len"] == MOST_TOKENS
    longest_prompt = completion(prompt=[5] * (MOST_TOKENS - 1), max_tokens=1)
    longest_answer = completion(prompt=[5] * 2000, max_tokens=MOST_TOKENS - 2000, stop=["e"])

    for body in (longest_prompt, longest_answer):
        answer = await http.post(COMPLETIONS, json=body)
        assert answer.json()["usage"]["prompt_tokens"] == len(body["prompt"])

    await check_well(http, watch)


async def test_two_live_requests_with_one_id_both_succeed(
    http: httpx.AsyncClient, watch: Watch
) -> None:
    """Clients repeat ids, also while the first is served; ours are our own."""
    headers = {"x-request-id": "job-17"}

    answers = await asyncio.gather(
        *(http.post(CHAT, json=chat(), headers=headers) for _ in range(2))
    )

    assert [answer.headers["x-request-id"] for answer in answers] == ["job-17"] * 2
    first, second = (answer.json()["choices"][0]["message"] for answer in answers)
    assert first == second
    assert len(watch.submits) == 2
    await check_well(http, watch)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_gone_before_the_first_token_leaves_nothing(
    http: httpx.AsyncClient, watch: Watch, is_stream: bool
) -> None:
    """Most of a long prompt is never computed."""
    prompt = [7 + number % 4000 for number in range(MOST_TOKENS - 100)]
    body = completion(prompt=prompt, max_tokens=50, stream=is_stream)
    asking = asyncio.create_task(http.post(COMPLETIONS, json=body))
    await watch.eventually(lambda: watch.submits)

    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    await watch.pools_at_base()
    (request_id,) = watch.submits
    assert watch.placements_ended[request_id] == 1
    assert not watch.dones
    await check_well(http, watch)


async def test_a_client_gone_amid_its_body_leaves_nothing(
    small_stack: Stack, http: httpx.AsyncClient, watch: Watch
) -> None:
    """Half a request is no request."""
    _, writer = await asyncio.open_connection("127.0.0.1", small_stack.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        b'{"model": "demo'
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    await check_well(http, watch)
    assert len(watch.submits) == 1  # the ordinary request
