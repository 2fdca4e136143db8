"""One request is one tree of spans across all five services, however it ends."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.local.plan import TRACE_FILE
from services.local.stack import Stack
from tests.system.spans import Trace, TraceFile
from tests.system.watch import watching

ROOT = "chat demo-fp8"
# Who a span of a served request belongs to, and the span it is a child of.
TREE = {
    "gateway.place": ("gateway", ROOT),
    "router.place": ("router", "gateway.place"),
    "index.lookup": ("router", "router.place"),
    "kv_index.longest_prefix": ("kv_index", "index.lookup"),
    "gateway.submit": ("gateway", ROOT),
    "prefill.queue": ("prefill", "gateway.submit"),
    "prefill.chunk": ("prefill", "gateway.submit"),
    "gateway.first_token": ("gateway", ROOT),
    "handoff.offer": ("prefill", "gateway.submit"),
    "handoff.done": ("prefill", "gateway.submit"),
    "decode.queue": ("decode", "handoff.offer"),
    "handoff.pull": ("decode", "handoff.offer"),
    "decode.generate": ("decode", "handoff.offer"),
    "gateway.stream": ("gateway", ROOT),
}


@pytest_asyncio.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=60) as made:
        yield made


@pytest.fixture
def file(stack: Stack) -> TraceFile:
    return TraceFile(Path(stack.folder / TRACE_FILE))


def chat(num_repeats: int = 10, **fields: Any) -> dict[str, Any]:
    """A question nobody has asked before, so that all of its blocks move."""
    words = f"{secrets.token_hex(8)} " + "What does river mean? " * num_repeats
    message = {"role": "user", "content": words}
    return {"model": "demo-fp8", "messages": [message], "max_tokens": 5, **fields}


def context() -> tuple[str, dict[str, str]]:
    """A client's own trace: its id and the header that carries it."""
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}


def check_tree(trace: Trace) -> None:
    """Every span that is there has its place, and there is no other root."""
    assert trace.root.name == ROOT
    for span in trace.spans:
        if span is not trace.root:
            parent = trace.parent_of(span)
            assert parent is not None
            assert (span.service, parent.name) == TREE[span.name]
            assert span.start_ns >= parent.start_ns
        assert trace.root.start_ns <= span.start_ns <= span.end_ns


def check_served(trace: Trace) -> None:
    """The whole path, in the order in which it is gone."""
    check_tree(trace)
    assert trace.names == {ROOT, *TREE}
    assert trace.services == {"gateway", "router", "kv_index", "prefill", "decode"}
    assert not any(span.failed for span in trace.spans)
    chunks = sorted(trace.all_named("prefill.chunk"), key=lambda span: span.start_ns)
    order = [
        trace.named("gateway.place"),
        trace.named("prefill.queue"),
        *chunks,
        trace.named("handoff.done"),
        trace.named("decode.generate"),
    ]
    starts = [span.start_ns for span in order]
    assert starts == sorted(starts)
    assert trace.named("decode.queue").end_ns <= trace.named("handoff.pull").start_ns
    assert trace.named("handoff.pull").end_ns <= trace.named("decode.generate").start_ns
    assert trace.named("decode.generate").end_ns <= trace.root.end_ns


@pytest.mark.parametrize("num_repeats", [0, 100], ids=["less than a block", "many blocks"])
async def test_a_chat_is_one_tree_across_five_services(
    http: httpx.AsyncClient, file: TraceFile, num_repeats: int
) -> None:
    """What moved and how long it took is read off one picture."""
    answer = (await http.post("/chat/completions", json=chat(num_repeats))).json()

    trace = await file.trace(await file.trace_id_of(answer["id"]), ROOT, *TREE)
    check_served(trace)
    assert trace.root.parent_id is None
    num_prompt_tokens = answer["usage"]["prompt_tokens"]
    num_blocks = -(-num_prompt_tokens // 64)
    assert (num_blocks > 1) == (num_repeats > 0)
    assert trace.named("kv_index.longest_prefix").attributes["num_blocks"] == (
        num_prompt_tokens // 64
    )
    chunks = trace.all_named("prefill.chunk")
    num_hit_tokens = trace.named("prefill.queue").attributes["num_hit_tokens"]
    num_computed = sum(span.attributes["num_tokens"] for span in chunks)
    assert num_hit_tokens + num_computed == num_prompt_tokens
    pull = trace.named("handoff.pull").attributes
    assert pull["blocks"] == num_blocks - pull["hit_tokens"] // 64
    assert pull["bytes"] > pull["blocks"] * 64 * 656
    assert trace.named("decode.generate").attributes["tokens"] == 5
    usage = answer["usage"]
    assert trace.root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert trace.root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]


async def test_the_root_is_a_child_of_the_client_s_span_and_ends_at_the_last_byte(
    http: httpx.AsyncClient, file: TraceFile
) -> None:
    """An agent's own trace goes on in ours."""
    trace_id, headers = context()

    async with http.stream(
        "POST", "/chat/completions", json=chat(stream=True), headers=headers
    ) as response:
        lines = [line async for line in response.aiter_lines() if line]

    assert lines[-1] == "data: [DONE]"
    trace = await file.trace(trace_id, ROOT, *TREE)
    check_served(trace)
    assert trace.root.parent_id == headers["traceparent"].split("-")[2]
    assert trace.named("gateway.stream").end_ns <= trace.root.end_ns


async def test_a_senseless_traceparent_costs_the_request_nothing(
    http: httpx.AsyncClient, file: TraceFile
) -> None:
    """Whatever a proxy writes there, the request has a tree of its own."""
    answer = await http.post(
        "/chat/completions", json=chat(), headers={"traceparent": "00-xyz-0-zz"}
    )

    assert answer.status_code == 200
    trace_id = await file.trace_id_of(answer.json()["id"])
    check_served(await file.trace(trace_id, ROOT, *TREE))


async def test_concurrent_requests_are_as_many_trees(
    http: httpx.AsyncClient, file: TraceFile
) -> None:
    """A step computes chunks of many requests; each span belongs to one."""
    contexts = [context() for _ in range(8)]

    answers = await asyncio.gather(
        *(
            http.post("/chat/completions", json=chat(10 + number), headers=headers)
            for number, (_, headers) in enumerate(contexts)
        )
    )

    for answer, (trace_id, headers) in zip(answers, contexts, strict=True):
        trace = await file.trace(trace_id, ROOT, *TREE)
        check_served(trace)
        assert trace.root.parent_id == headers["traceparent"].split("-")[2]
        assert trace.root.attributes["gen_ai.response.id"] == answer.json()["id"]
        request_id = trace.root.attributes["farspan.request_id"]
        for span in trace.spans:
            assert span.attributes.get("request_id", request_id) == request_id


@pytest.mark.parametrize("num_events", [0, 3])
async def test_an_aborted_request_is_a_whole_tree_too(
    stack: Stack, http: httpx.AsyncClient, file: TraceFile, num_events: int
) -> None:
    """Left before the first token and after it: every span that was begun ends."""
    trace_id, headers = context()
    body = chat(1500 if num_events == 0 else 10, stream=True, max_tokens=2000)

    async with watching(stack) as watch:
        async with http.stream("POST", "/chat/completions", json=body, headers=headers) as response:
            if num_events == 0:
                await watch.eventually(lambda: watch.offers)
            lines = response.aiter_lines()
            for _ in range(num_events):
                await anext(lines)
        await watch.pools_at_base()

    expected = {"prefill.chunk", "decode.queue", "gateway.first_token"}
    if num_events:
        expected |= {"handoff.pull", "decode.generate", "gateway.stream"}
    trace = await file.trace(trace_id, ROOT, *expected)
    check_tree(trace)
    assert trace.root.attributes["error.type"] == "client_left"


async def test_a_failing_request_is_a_whole_tree_too(
    stack: Stack, http: httpx.AsyncClient, file: TraceFile
) -> None:
    """Its deadline passes while the answer goes on; the root says so."""
    trace_id, headers = context()
    endless = chat(max_tokens=2000, ignore_eos=True)

    answer = await http.post(
        "/chat/completions", json=endless, headers={**headers, "x-request-timeout-s": "2"}
    )

    assert answer.status_code == 504
    async with watching(stack) as watch:
        await watch.pools_at_base()
    trace = await file.trace(trace_id, ROOT, "prefill.queue", "prefill.chunk", "decode.queue")
    check_tree(trace)
    assert trace.root.attributes["error.type"] == "deadline_exceeded"
    assert trace.root.failed


async def test_a_refused_request_is_a_root_alone(http: httpx.AsyncClient, file: TraceFile) -> None:
    """Nothing was asked of anybody."""
    trace_id, headers = context()

    answer = await http.post(
        "/chat/completions", content=json.dumps({"model": "demo-fp8"}), headers=headers
    )

    assert answer.status_code == 400
    trace = await file.trace(trace_id, ROOT)
    assert [span.name for span in trace.spans] == [ROOT]
    assert trace.root.attributes["error.type"] == "missing_required_parameter"
    assert not trace.root.failed  # the client did
