"""Several answers to one request, and what is told beside their text."""

import asyncio
import json
from typing import Any

import pytest

from shared import farspan_pb2 as pb
from tests.services.gateway.stage import MODEL, Stage, eventually

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


async def chat(stage: Stage, **fields: Any) -> dict[str, Any]:
    answer = await stage.http.post(CHAT, json={"model": MODEL, "messages": [USER], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(stage: Stage, path: str, **fields: Any) -> list[dict[str, Any]]:
    """A stream's events, which end with [DONE]."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await stage.http.post(path, json={"model": MODEL, **options, **fields})
    assert answer.status_code == 200, answer.text
    *events, done = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


async def test_several_choices_share_a_prompt_and_differ_in_their_seed(stage: Stage) -> None:
    """The prompt is counted once, answers each; seed + i names choice i (F14)."""
    plan = stage.plan("x</think>yes", cached_tokens=3)

    answer = await chat(stage, n=3, seed=2**64 - 2)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"yes"}
    seeds = sorted(submit.sampling.seed for submit in stage.fleet.submits)
    assert seeds == [0, 2**64 - 2, 2**64 - 1]
    (prompt,) = {submit.token_ids for submit in stage.fleet.submits}
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt) // 4
    assert usage["completion_tokens"] == 3 * len(plan.answer)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    await eventually(lambda: len(set(stage.fleet.ended)) == 3)


async def test_streamed_choices_are_told_apart_and_cost_the_same(stage: Stage) -> None:
    """Each chunk names its choice; there is one usage, at the end."""
    stage.plan("x</think>yes")

    *events, last = await streamed(stage, CHAT, messages=[USER], n=2)

    for index in range(2):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == "yes"
        assert [choice["finish_reason"] for choice in own][-1] == "stop"
        assert own[0]["delta"]["role"] == "assistant"
    assert {event["usage"] for event in events} == {None}
    assert last["choices"] == []
    assert last["usage"] == (await chat(stage, n=2))["usage"]


async def test_several_prompts_are_answered_in_their_order(stage: Stage) -> None:
    """Choice p * n + i is answer i to prompt p."""
    stage.plan(" yes")

    answer = await stage.complete(prompt=[[5, 6], [7]], n=2, echo=True)

    texts = [choice["text"] for choice in answer.json()["choices"]]
    first, second = (stage.tokenizer.decode(ids, skips_special=False) for ids in ([5, 6], [7]))
    assert texts == [f"{first} yes"] * 2 + [f"{second} yes"] * 2
    assert answer.json()["usage"]["prompt_tokens"] == 3


async def test_one_choice_that_fails_fails_the_request_and_ends_the_others(stage: Stage) -> None:
    """Half an answer under status 200 would pass for a whole one."""
    broken = pb.Failure(kind=pb.FAILURE_KIND_INTERNAL, message="a bug")
    stage.plan("a</think>b", fail_at=2, failure=broken)
    held = stage.plan("a</think>b", hold_at=1)

    answer = await stage.http.post(CHAT, json={"model": MODEL, "messages": [USER], "n": 2})

    assert answer.status_code == 500
    assert held.hold_at == 1
    await eventually(lambda: len(stage.fleet.ended) == 2)
    assert len({request_id for _, request_id in stage.fleet.cancels}) == 1


async def test_of_many_answers_some_go_at_once_and_all_are_given(stage: Stage) -> None:
    """All at once would fill the workers' queues with one request."""
    held = stage.plan(" yes", hold_at=1)

    asking = asyncio.create_task(stage.complete(prompt=[[5]] * 40, n=2))
    await eventually(lambda: len(stage.fleet.submits) == 32)
    await asyncio.sleep(0.1)
    assert len(stage.fleet.submits) == 32
    stage.fleet.release()
    answer = (await asking).json()

    assert [choice["index"] for choice in answer["choices"]] == list(range(80))
    assert {choice["text"] for choice in answer["choices"]} == {" yes"}
    assert answer["usage"]["completion_tokens"] == 80 * len(held.answer)


async def test_a_choice_that_is_refused_is_a_status_in_a_stream_too(stage: Stage) -> None:
    """The stream begins when every choice is accepted."""
    stage.plan("a</think>b")
    full = pb.Failure(kind=pb.FAILURE_KIND_BAD_REQUEST, message="no")
    stage.plan("a", refuse=full)

    body = {"model": MODEL, "messages": [USER], "n": 2, "stream": True}
    answer = await stage.http.post(CHAT, json=body)

    assert answer.status_code == 400
    await eventually(lambda: len(stage.fleet.ended) == 2)


async def test_every_token_of_a_chat_has_its_logprob_the_first_too(stage: Stage) -> None:
    """The first one's comes from prefill (F15); a stream tells the same."""
    plan = stage.plan("x</think>yes")

    answer = await chat(stage, logprobs=True, top_logprobs=2)
    *events, _ = await streamed(stage, CHAT, messages=[USER], logprobs=True, top_logprobs=2)

    told = answer["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in told] == pytest.approx([-ids / 100 for ids in plan.answer])
    assert [len(each["top_logprobs"]) for each in told] == [2] * len(plan.answer)
    assert bytes(byte for each in told for byte in each["bytes"]).decode() == "x</think>yes"
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [each for part in parts if part for each in part["content"]] == told


async def test_an_echoed_prompt_comes_with_its_logprobs(stage: Stage) -> None:
    """As evaluation harnesses ask: of the first token there is none."""
    plan = stage.plan(" yes")
    ids = stage.tokenizer.encode("Once upon")

    answer = (await stage.complete(prompt=ids, echo=True, logprobs=1, max_tokens=1)).json()

    (choice,) = answer["choices"]
    told = choice["logprobs"]
    whole = [*ids, plan.answer[0]]
    assert choice["text"].startswith("Once upon")
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx([-each / 100 for each in whole[1:]])
    assert "".join(told["tokens"]) == choice["text"]
    offsets = [sum(map(len, told["tokens"][:place])) for place in range(len(whole))]
    assert told["text_offset"] == offsets
    assert answer["usage"]["completion_tokens"] == 1
    *events, _ = await streamed(
        stage, "/v1/completions", prompt=ids, echo=True, logprobs=1, max_tokens=1
    )
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [each for part in parts if part for each in part["token_logprobs"]] == (
        told["token_logprobs"]
    )


async def test_tokens_without_the_logprobs_that_were_asked_for_are_no_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old worker does not know the field; null would look like an answer."""
    monkeypatch.setattr("tests.fakes.logprobs_of", lambda *_: None)
    stage.plan("x</think>yes")

    answer = await stage.http.post(
        CHAT, json={"model": MODEL, "messages": [USER], "logprobs": True}
    )

    assert answer.status_code == 500
    assert "logprobs" in answer.json()["error"]["message"]


async def test_a_stop_token_of_the_client_s_is_not_shown(stage: Stage) -> None:
    """It is counted: it was generated."""
    stage.plan(" yes no")
    ids = stage.tokenizer.encode(" yes no")

    answer = (await stage.complete(stop_token_ids=[ids[-1]])).json()

    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == stage.tokenizer.decode(ids[:-1], skips_special=True)
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert ids[-1] in stage.fleet.submits[0].sampling.stop_token_ids


async def test_a_client_that_keeps_up_gets_an_event_a_token(stage: Stage) -> None:
    """Who measures times between tokens counts events."""
    plan = stage.plan(" one two three four five")

    *events, _ = await streamed(stage, "/v1/completions", prompt="a")

    texts = [event for event in events if event["choices"][0]["text"]]
    assert len(texts) == len(plan.answer) - 1  # the stop token has no text


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_usage_runs_along_where_it_is_asked_to(stage: Stage, path: str) -> None:
    """As load generators count; the last chunk has no choices and the whole."""
    plan = stage.plan("a</think>b c d")
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"messages": [USER]} if path == CHAT else {"prompt": "a"}

    *events, last = await streamed(stage, path, stream_options=options, **asked)

    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(plan.answer)
    assert events[-1]["usage"] == last["usage"]
    assert last["choices"] == []


async def test_all_that_is_wished_for_reaches_the_workers(stage: Stage) -> None:
    """And what is not said keeps the checkpoint's default."""
    stage.plan("x</think>y")
    wishes = {
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100, "9": 1.5},
        "min_tokens": 3,
        "top_k": -1,
        "priority": 2,
    }

    await stage.http.post(
        CHAT,
        json={"model": MODEL, "messages": [USER], **wishes},
        headers={"x-session-id": "s1"},
    )

    (submit,), (place,) = stage.fleet.submits, stage.fleet.places
    sampling = submit.sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (
        0.25,
        0.5,
        -0.5,
    )
    assert (sampling.repetition_penalty, sampling.min_new_tokens, sampling.top_k) == (1.5, 3, 0)
    assert dict(zip(sampling.bias_token_ids, sampling.biases, strict=True)) == {7: -100, 9: 1.5}
    assert (place.priority, place.session) == (2, "s1")
    assert sampling.temperature == pytest.approx(stage.tokenizer.checkpoint.temperature)


@pytest.mark.parametrize(
    "header",
    [
        "x-correlation-id",
        "x-session-id",
        "x-claude-code-session-id",
        "session-id",
        "x-session-affinity",
    ],
)
async def test_a_session_is_read_from_each_usual_header(stage: Stage, header: str) -> None:
    """The body's own word goes first."""
    stage.plan("x</think>y")
    body = {"model": MODEL, "messages": [USER]}

    await stage.http.post(CHAT, json=body, headers={header: "h"})
    await stage.http.post(CHAT, json={**body, "prompt_cache_key": "b"}, headers={header: "h"})

    assert [place.session for place in stage.fleet.places] == ["h", "b"]
