"""One ledger: what a client is told is what metrics, log and timeline say, whatever happened."""

import json
import logging
import re
from typing import Any

import pytest

from tests.services.gateway.stage import MODEL, Stage, eventually

CHAT = "/v1/chat/completions"
TEXT = "so it is</think>one two three"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LOGGED = re.compile(
    r"(\d+) prompt tokens \((\d+) cached\), (\d+) generated \((\d+) reasoning\), (\d+) attempts"
)


async def counted(stage: Stage) -> dict[str, float]:
    """All metrics that are not histograms."""
    text = (await stage.http.get("/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("farspan_gateway_"): float(value) for name, value in lines}


def numbers(usage: dict[str, Any]) -> tuple[int, ...]:
    """Prompt, cached, generated, reasoning."""
    return (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
    )


async def asked(stage: Stage, *, is_stream: bool) -> tuple[int, ...]:
    """The usage that a client is told."""
    if not is_stream:
        return numbers((await stage.http.post(CHAT, json=BODY)).json()["usage"])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await stage.http.post(CHAT, json={**BODY, **options})
    last = answer.text.split("\n\n")[-3]
    return numbers(json.loads(last.removeprefix("data: "))["usage"])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_lost_worker_is_not_paid_for(
    stage: Stage, caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    """Response, metrics, log and timeline agree; tokens of two attempts are counted once."""
    caplog.set_level(logging.INFO)
    await stage.fleet.add_pair(1)
    plan = stage.plan(TEXT, cached_tokens=5, die_at=3)
    stage.plan(TEXT, cached_tokens=9)
    before = await counted(stage)

    told = await asked(stage, is_stream=is_stream)

    thought = len(stage.tokenizer.encode("so it is</think>"))
    prompt = len(stage.fleet.submits[0].token_ids) // 4
    assert told == (prompt, 5, len(plan.answer), thought)
    after = await counted(stage)
    names = ("prompt_tokens", 'cached_tokens{tier="device"}', "completion_tokens")
    found = [name.replace("tokens", "tokens_total", 1) for name in (*names, "reasoning_tokens")]
    assert tuple(after[name] - before.get(name, 0.0) for name in found) == told
    (logged,) = [hit for record in caplog.messages for hit in LOGGED.findall(record)]
    assert tuple(map(int, logged)) == (*told, 2)


async def test_an_end_is_counted_by_what_it_was(stage: Stage) -> None:
    """Answered, refused, left: each request once, and none stays in flight."""
    stage.plan(TEXT, hold_at=2)
    stage.fleet.release()
    await stage.http.post(CHAT, json=BODY)
    await stage.http.post(CHAT, json={**BODY, "n": 0})
    stage.fleet._released.clear()
    async with stage.http.stream("POST", CHAT, json={**BODY, "stream": True}) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: bool(stage.fleet.cancels))

    figures = await counted(stage)

    ended = {
        outcome: figures[f'requests_total{{operation="chat",outcome="{outcome}"}}']
        for outcome in ("ok", "invalid_value", "client_left")
    }
    assert ended == {"ok": 1, "invalid_value": 1, "client_left": 1}
    assert figures["requests_in_flight"] == 0


async def test_a_timeline_is_found_by_the_response_s_ids(stage: Stage) -> None:
    """Both of them: which one a person has depends on where he looks."""
    stage.plan(TEXT)

    answer = await stage.http.post(CHAT, json=BODY)

    for name in (answer.headers["x-request-id"], answer.json()["id"]):
        timeline = (await stage.http.get(f"/farspan/requests/{name}/timeline")).json()
        assert timeline["begin_unix_us"] < timeline["first_token_unix_us"]
        assert timeline["first_token_unix_us"] <= timeline["end_unix_us"]
        assert timeline["usage"]["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
