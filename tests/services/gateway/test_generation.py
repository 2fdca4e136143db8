"""One request's life when workers fail: the client sees one unbroken answer, or one clear error."""

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from services.local.servers import free_port, nats_command
from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import token_bytes, token_ids
from tests.services.gateway.stage import MODEL, Stage, eventually, staged

TEXT = "One two three four five six"
OVERLOADED = pb.Failure(kind=pb.FAILURE_KIND_OVERLOADED, message="full")
LOST = pb.Failure(kind=pb.FAILURE_KIND_WORKER_LOST, message="the peer is gone")


def text_of(answer: Any) -> str:
    return str(answer.json()["choices"][0]["text"])


async def test_an_ended_request_is_told_to_the_router_and_cancelled_nowhere(stage: Stage) -> None:
    """The reservation goes; workers that are done need no cancel."""
    stage.plan(TEXT)

    await stage.complete()

    await eventually(lambda: stage.fleet.ended == [stage.fleet.submits[0].request_id])
    await asyncio.sleep(0.05)
    assert stage.fleet.cancels == []


async def test_lost_and_repeated_messages_change_nothing(stage: Stage) -> None:
    """Delivery is at most once, and resending may overlap."""
    stage.plan(TEXT, lost=frozenset({1, 3}), sends_twice=True)

    answer = await stage.complete()

    assert text_of(answer) == TEXT
    assert ("d0", 1) in stage.fleet.resends


async def test_a_lost_first_token_is_asked_of_prefill(stage: Stage) -> None:
    """Decode never had it to send."""
    stage.plan(TEXT, lost=frozenset({0}), hold_at=3)

    answering = asyncio.create_task(stage.complete())
    await eventually(lambda: ("p0", 0) in stage.fleet.resends)
    stage.fleet.release()

    assert text_of(await answering) == TEXT


async def test_lost_last_tokens_are_resent_before_the_end_counts(stage: Stage) -> None:
    """The end is answered with the index still needed."""
    plan = stage.plan(TEXT)
    plan.lost = frozenset(range(2, len(plan.answer)))

    answer = await stage.complete()

    assert text_of(answer) == TEXT
    await eventually(lambda: stage.fleet.final_replies == [len(plan.answer)])


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_answer_survives_the_death_of_its_decode_worker(
    nats_url: str, is_stream: bool
) -> None:
    """Another pair continues after the tokens the client has, with their positions spent."""
    async with staged(nats_url, heartbeat_timeout_s=0.6) as stage:
        await stage.fleet.add_pair(1)
        plan = stage.plan(TEXT, die_at=3, cached_tokens=1)
        stage.plan(TEXT, cached_tokens=4)

        answer = await stage.complete(max_tokens=20, stream=is_stream, seed=5)

        first, second = stage.fleet.submits
        assert second.num_resumed_tokens == 3
        assert second.token_ids == first.token_ids + second.token_ids[-12:]
        assert token_ids(second.token_ids)[-3:] == plan.answer[:3]
        assert second.sampling.max_new_tokens == 17
        assert second.sampling.seed == first.sampling.seed == 5
        assert second.decode.worker_id == "d1"
        assert [ref.worker_id for ref in stage.fleet.places[1].excluded] == ["d0"]
        if is_stream:
            events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
            texts = [json.loads(event)["choices"][0]["text"] for event in events]
            assert "".join(texts) == TEXT
        else:
            assert text_of(answer) == TEXT
            usage = answer.json()["usage"]
            assert usage["completion_tokens"] == len(plan.answer)
            assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
        await eventually(
            lambda: sorted(stage.fleet.ended) == sorted([first.request_id, second.request_id])
        )
        assert {request_id for _, request_id in stage.fleet.cancels} == {first.request_id}


async def test_a_restarted_worker_is_another_worker(stage: Stage) -> None:
    """Its new epoch tells at once that the old life's answer is lost; no silence is needed."""
    stage.plan(TEXT, hold_at=2)
    stage.plan(TEXT)
    begun_s = time.monotonic()
    answering = asyncio.create_task(stage.complete())
    await eventually(lambda: len(stage.fleet.submits) == 1)

    await stage.fleet.add(pb.ROLE_DECODE, "d0")

    assert text_of(await answering) == TEXT
    assert time.monotonic() - begun_s < 2
    assert stage.fleet.submits[1].decode.epoch > stage.fleet.submits[0].decode.epoch


async def test_a_worker_that_reports_a_lost_peer_is_replaced_along_with_it(stage: Stage) -> None:
    """Who is said to be gone is avoided, where another is left."""
    await stage.fleet.add_pair(1)
    stage.plan(TEXT, fail_at=2, failure=LOST)
    stage.plan(TEXT)

    answer = await stage.complete()

    assert text_of(answer) == TEXT
    assert [ref.worker_id for ref in stage.fleet.places[1].excluded] == ["p0"]


async def test_a_doubtful_worker_is_better_than_none(stage: Stage) -> None:
    """With one pair, a passing failure is tried again on the same workers."""
    stage.plan(TEXT, fail_at=2, failure=LOST)
    stage.plan(TEXT)

    answer = await stage.complete()

    assert text_of(answer) == TEXT
    assert len(stage.fleet.submits) == 2
    ids = [place.request_id for place in stage.fleet.places]
    assert len(set(ids)) == len(ids) == 3  # an ended placement's id would be promised nothing


async def test_a_full_worker_s_request_goes_to_another(stage: Stage) -> None:
    """The router's picture may be a moment old."""
    await stage.fleet.add_pair(1)
    stage.plan(TEXT, refuse=OVERLOADED)
    stage.plan(TEXT)

    answer = await stage.complete()

    assert text_of(answer) == TEXT
    assert stage.fleet.submits[1].prefill.worker_id == "p1"


async def test_a_full_fleet_is_the_client_s_to_wait_for(stage: Stage) -> None:
    """429 at once when nothing has been said yet."""
    stage.plan(TEXT, refuse=OVERLOADED)
    begun_s = time.monotonic()

    answer = await stage.complete()

    assert answer.status_code == 429
    assert time.monotonic() - begun_s < 1


async def test_three_attempts_are_enough(stage: Stage) -> None:
    """A request that kills workers must not kill them all."""
    for number in range(1, 4):
        await stage.fleet.add_pair(number)
    stage.plan(TEXT, fail_at=1, failure=LOST)

    answer = await stage.complete()

    assert answer.status_code == 503
    assert len(stage.fleet.submits) == 3
    await eventually(lambda: len(stage.fleet.ended) == 3)


async def test_a_client_s_fault_is_never_retried(stage: Stage) -> None:
    """It would fail the same way everywhere."""
    await stage.fleet.add_pair(1)
    stage.plan(TEXT, refuse=pb.Failure(kind=pb.FAILURE_KIND_TOO_LONG, message="too long"))

    answer = await stage.complete()

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(stage.fleet.submits) == 1


async def test_an_answer_whose_end_was_lost_is_whole(nats_url: str) -> None:
    """The last token was there: no other worker has anything to add."""
    async with staged(nats_url, heartbeat_timeout_s=0.6) as stage:
        plan = stage.plan(TEXT)
        plan.die_at = len(plan.answer)

        answer = await stage.complete()

        assert text_of(answer) == TEXT
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert len(stage.fleet.submits) == 1


async def test_an_end_repeated_after_the_answer_is_over_is_accepted(stage: Stage) -> None:
    """Its sender must be able to forget the request."""
    stage.plan(TEXT, hold_at=3)
    asking = asyncio.create_task(stage.complete(stop=" two"))
    await asking
    submit = stage.fleet.submits[0]
    message = pb.Tokens(
        request_id=submit.request_id,
        sender=submit.decode,
        index=3,
        token_ids=token_bytes([1, 2]),
        end=pb.End(reason=pb.FINISH_REASON_STOP),
    )
    reply = await stage.fleet.bus.request(
        subjects.TOKENS_END, message, timeout_s=2, gateway=submit.gateway_id
    )

    assert reply.next_index == 5


async def test_a_stranger_s_tokens_are_not_believed(stage: Stage) -> None:
    """Wrong tokens answered with 200 would be the worst fault."""
    stage.plan(TEXT, hold_at=1)
    answering = asyncio.create_task(stage.complete())
    await eventually(lambda: len(stage.fleet.submits) == 1)
    submit = stage.fleet.submits[0]
    old_life = pb.WorkerRef(worker_id="d0", epoch=submit.decode.epoch - 1)
    forged = pb.Tokens(
        request_id=submit.request_id, sender=old_life, index=1, token_ids=token_bytes([7, 7, 7])
    )
    batch = pb.TokenBatch(messages=[forged])
    await stage.fleet.bus.publish(subjects.TOKENS, batch, gateway=submit.gateway_id)
    await asyncio.sleep(0.05)
    stage.fleet.release()

    assert text_of(await answering) == TEXT


async def test_many_requests_at_once_all_end(stage: Stage) -> None:
    """None is lost or mixed up, and nothing stays behind."""
    stage.plan(TEXT)

    answers = await asyncio.gather(*(stage.complete() for _ in range(60)))

    assert [text_of(answer) for answer in answers] == [TEXT] * 60
    await eventually(lambda: len(stage.fleet.ended) == 60)
    assert answers[0].json()["model"] == MODEL


async def test_an_answer_survives_a_restart_of_the_bus(tmp_path: Path) -> None:
    """Nobody's silence counts meanwhile, and what was lost is sent again."""
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    server = await nats_server(port, tmp_path)
    async with staged(url, heartbeat_timeout_s=1.0) as stage:
        stage.plan(TEXT, hold_at=2)
        answering = asyncio.create_task(stage.complete())
        await eventually(lambda: len(stage.fleet.submits) == 1)
        server.kill()
        await server.wait()
        await asyncio.sleep(1.5)
        stage.fleet.release()
        server = await nats_server(port, tmp_path)

        answer = await answering

        assert text_of(answer) == TEXT
        assert len(stage.fleet.submits) == 1
    server.kill()
    await server.wait()


async def test_an_answer_survives_a_bus_that_stands_still(tmp_path: Path) -> None:
    """Longer than any silence that counts, while the connection looks alive all the time."""
    port = free_port()
    server = await nats_server(port, tmp_path)
    async with staged(f"nats://127.0.0.1:{port}") as stage:
        stage.plan(TEXT, hold_at=2)
        stage.plan(TEXT)
        answering = asyncio.create_task(stage.complete(stream=True))
        await eventually(lambda: len(stage.fleet.submits) == 1)
        server.send_signal(signal.SIGSTOP)
        await asyncio.sleep(4.0)
        server.send_signal(signal.SIGCONT)

        answer = await answering

        chunks = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert chunks.pop() == "[DONE]"
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == TEXT
    server.kill()
    await server.wait()


async def test_a_silent_worker_that_speaks_again_may_end_the_answer(nats_url: str) -> None:
    """A stopped process, or a bus that stood still, is not gone for ever."""
    async with staged(nats_url, heartbeat_timeout_s=0.6) as stage:
        stage.plan(TEXT, hold_at=3)
        stage.plan(TEXT)
        answering = asyncio.create_task(stage.complete())
        await eventually(lambda: len(stage.fleet.submits) == 1)
        stage.fleet.workers["d0"].is_alive = False
        await asyncio.sleep(1.5)
        stage.fleet.workers["d0"].is_alive = True

        answer = await answering

    assert text_of(answer) == TEXT
    assert len(stage.fleet.submits) == 2


async def test_a_silent_worker_that_speaks_again_is_as_good_as_others(nats_url: str) -> None:
    """The other one is full; nobody is told so while a healthy worker waits."""
    async with staged(nats_url, heartbeat_timeout_s=0.6) as stage:
        await stage.fleet.add(pb.ROLE_DECODE, "d1")
        stage.plan(TEXT, hold_at=0)
        stage.plan(TEXT, hold_at=0, fail_at=0, failure=OVERLOADED)
        stage.plan(TEXT)
        answering = asyncio.create_task(stage.complete())
        await eventually(lambda: len(stage.fleet.submits) == 1)
        stage.fleet.workers["d0"].is_alive = False
        await eventually(lambda: len(stage.fleet.submits) == 2)
        stage.fleet.workers["d0"].is_alive = True
        await asyncio.sleep(0.4)  # it is heard
        stage.fleet.release()

        assert text_of(await answering) == TEXT
        assert [each.decode.worker_id for each in stage.fleet.submits] == ["d0", "d1", "d0"]


async def nats_server(port: int, folder: Path) -> asyncio.subprocess.Process:
    """A server of the test's own, answering."""
    with (folder / "nats.log").open("ab") as log:
        server = await asyncio.create_subprocess_exec(*nats_command(port), stdout=log, stderr=log)
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)
        else:
            writer.close()
            await writer.wait_closed()
            return server
