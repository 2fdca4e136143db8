"""The worker as a process and with its real engine: KV that decode can pull, ends on every exit."""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from services.prefill import app
from shared import bus, subjects, telemetry
from shared import farspan_pb2 as pb
from shared.block_hash import token_ids
from shared.engine.handoff.importer import KvImporter, PullRequest
from shared.engine.handoff.placing import Destination
from shared.engine.step import Sampling
from tests import demo
from tests.services.prefill.stage import (
    CHECKPOINT,
    MODEL,
    DecodeSide,
    FakeEngine,
    GatewaySide,
    Stage,
    settings,
    stage,
    until,
)

LENGTH = 300
_workers = (f"app-{i}" for i in itertools.count())


@pytest.fixture(autouse=True)
def use_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


def pulled(offer: pb.HandoffOffer) -> torch.Tensor:
    """[layers, LENGTH, values] fp32, read over NIXL as decode does."""
    layout, num_pages = offer.layout, -(-LENGTH // 64)
    destination = Destination(
        torch.empty((layout.num_mla_layers, num_pages, 64, layout.row_bytes), dtype=torch.uint8),
        torch.empty(
            (layout.num_index_layers, num_pages, layout.index_page_bytes), dtype=torch.uint8
        ),
        range(num_pages),
    )
    pull = PullRequest(
        ranks=offer.ranks,
        blocks=offer.blocks,
        epoch=offer.prefill.epoch,
        interleave=layout.interleave,
        first_token=0,
        last_token=LENGTH,
        deadline_s=20.0,
        destination=destination,
    )
    KvImporter("test", layout, staging_bytes=1 << 25, num_lanes=1).pull(pull)
    return destination.host_rows.flatten(1, 2)[:, :LENGTH].contiguous().view(torch.float32)


async def test_a_prompt_comes_out_as_kv_and_a_first_token(nats_url: str) -> None:
    """Cold and behind a prefix hit: the hit changes time, never tokens or rows."""
    text = list(demo.text_tokens()[:LENGTH])
    one = demo.reference(LENGTH)
    expected = one.prefill(text, LENGTH, Sampling())
    rows = one.pool.rows.transpose(0, 1).flatten(1, 2)[:, :LENGTH].contiguous()
    config = settings(nats_url, next(_workers))

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        link = await enter(bus.connect(nats_url, "test"))
        decode = await enter(DecodeSide(link, pb.WorkerRef(worker_id="d-app", epoch=5)).running())
        gateway = await enter(GatewaySide(link, "g-app").running())
        beats: list[pb.Heartbeat] = []

        async def on_beat(beat: pb.Heartbeat) -> None:
            if beat.worker.worker_id == config.worker_id:
                beats.append(beat)

        await enter(link.listen(subjects.HEARTBEAT, on_beat))
        prefill = await enter(app.serve(config))
        await until(lambda: beats[-1:] and beats[-1].state == pb.SERVICE_STATE_READY)
        on_stage = Stage(link, prefill, beats[-1].worker, decode, gateway)
        for count, request_id in enumerate(("cold", "hit"), start=1):
            await on_stage.accepted(on_stage.request(text, request_id))
            await until(lambda expected=count: len(decode.dones) == expected)
            found = await asyncio.to_thread(pulled, decode.offers[-1])
            await decode.release(on_stage.ref, request_id)

            torch.testing.assert_close(found, rows.view(torch.float32), rtol=1e-5, atol=1e-5)
            assert decode.dones[-1].first_token_id == expected.token_id
        await until(on_stage.is_at_base)

    assert [token_ids(m.token_ids) for m in gateway.tokens] == [[expected.token_id]] * 2
    assert [m.cached_tokens for m in gateway.tokens] == [0, 256]
    assert len(decode.dones[0].last_hidden) == 4 * demo.model().config.hidden_size
    states = [beat.state for beat in beats]
    assert states[0] == pb.SERVICE_STATE_STARTING and states[-1] == pb.SERVICE_STATE_STOPPED
    ready = next(beat for beat in beats if beat.state == pb.SERVICE_STATE_READY)
    assert ready.layout == decode.offers[0].layout
    assert ready.limits.max_sequence_tokens == 32 * 64


async def test_draining_finishes_what_is_here_and_takes_no_more(nats_url: str) -> None:
    engine = FakeEngine()
    async with stage(nats_url, next(_workers), engine, drain_s=10.0) as on_stage:
        engine.hold()
        await on_stage.accepted(on_stage.request(list(range(100)), max_new_tokens=1))
        await until(lambda: engine.is_running)
        draining = asyncio.create_task(on_stage.prefill.drain())
        await until(lambda: on_stage.beats[-1].state == pb.SERVICE_STATE_DRAINING)

        late = on_stage.request(list(range(100)), "late")
        assert await on_stage.refused(late) == pb.FAILURE_KIND_OVERLOADED
        engine.may_run.set()
        await draining
        assert (await on_stage.end()).reason == pb.FINISH_REASON_LENGTH


async def test_what_a_drain_cannot_finish_ends_as_lost(nats_url: str) -> None:
    """The gateway retries it elsewhere."""
    engine = FakeEngine()
    engine.hold()
    async with stage(nats_url, next(_workers), engine) as on_stage:
        await on_stage.accepted(on_stage.request(list(range(100))))
        await until(lambda: on_stage.decode.offers)
        gateway, decode = on_stage.gateway, on_stage.decode

        await on_stage.prefill.drain()
        on_stage.prefill.requests.end_all()
        assert (await on_stage.end()).failure.kind == pb.FAILURE_KIND_WORKER_LOST

    assert len(gateway.ends) == 1
    assert [abort.failure.kind for abort in decode.aborts] == [pb.FAILURE_KIND_WORKER_LOST]


async def test_missed_block_events_are_replayed(nats_url: str) -> None:
    async with stage(nats_url, next(_workers), FakeEngine()) as on_stage:
        await on_stage.accepted(on_stage.request(list(range(300))))
        await until(lambda: len(on_stage.events) >= 2)

        wanted = pb.ReplayRequest(worker=on_stage.ref, from_sequence=1)
        reply = await on_stage.bus.request(
            subjects.REPLAY, wanted, timeout_s=5, worker=on_stage.ref.worker_id
        )

        assert list(reply.batches)[: len(on_stage.events)] == on_stage.events


async def test_a_request_is_one_trace(nats_url: str, tmp_path: Path) -> None:
    """Queue, chunks, offer and done hang under the gateway's span."""
    trace_file = tmp_path / "spans.jsonl"
    with telemetry.configure("test", trace_file=trace_file):
        async with stage(nats_url, next(_workers), FakeEngine()) as on_stage:
            with telemetry.span("gateway.submit"):
                await on_stage.accepted(on_stage.request(list(range(300))))
            await until(lambda: on_stage.decode.dones)
            await on_stage.decode.release(on_stage.ref)
            await until(on_stage.is_at_base)

    spans = [json.loads(line) for line in trace_file.read_text().splitlines()]
    (root,) = [span for span in spans if span["name"] == "gateway.submit"]
    begun_ns = {span["name"]: span["start_ns"] for span in reversed(spans)}
    assert begun_ns["prefill.queue"] < begun_ns["prefill.chunk"]
    children = [span["name"] for span in spans if span["parent_id"] == root["span_id"]]
    assert sorted(set(children)) == [
        "handoff.done",
        "handoff.offer",
        "prefill.chunk",
        "prefill.queue",
    ]
    assert children.count("prefill.chunk") == 3


@asynccontextmanager
async def process(
    nats_url: str, worker_id: str, **environ: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """python -m services.prefill, killed at the end if it still runs."""
    variables = {
        "PREFILL_NATS_URL": nats_url,
        "PREFILL_CHECKPOINT": str(CHECKPOINT),
        "PREFILL_MODEL": MODEL,
        "PREFILL_WORKER_ID": worker_id,
        "PREFILL_NUM_BLOCKS": "32",
        "PREFILL_DRAIN_S": "1",
        **environ,
    }
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.prefill",
        env={**os.environ, **variables},
        cwd=CHECKPOINT.parents[1],
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        pytest.param({"PREFILL_NATS_URL": "nats://127.0.0.1:1"}, "no NATS server", id="nats"),
        pytest.param({"PREFILL_CHECKPOINT": "/nowhere"}, "/nowhere", id="checkpoint"),
        pytest.param({"PREFILL_KV_FORMAT": "fp4"}, "fp4", id="format"),
    ],
)
async def test_what_is_missing_at_the_start_is_told_in_one_line(
    nats_url: str, environ: dict[str, str], told: str
) -> None:
    async with process(nats_url, next(_workers), **environ) as started:
        _, stderr = await asyncio.wait_for(started.communicate(), 60)

    assert started.returncode == 2
    (line,) = [line for line in stderr.decode().splitlines() if line.startswith("prefill: ")]
    assert told in line


@pytest.mark.parametrize("victim", ["worker", "rank"])
async def test_a_process_says_farewell_whatever_ends_it(nats_url: str, victim: str) -> None:
    """SIGTERM is an orderly end; a killed rank is none, but its requests end all the same."""
    worker_id = next(_workers)
    beats: list[pb.Heartbeat] = []

    async def on_beat(beat: pb.Heartbeat) -> None:
        if beat.worker.worker_id == worker_id:
            beats.append(beat)

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        link = await enter(bus.connect(nats_url, "test"))
        decode_ref = pb.WorkerRef(worker_id=f"d-{worker_id}", epoch=5)
        decode = await enter(DecodeSide(link, decode_ref, is_deaf_to_done=True).running())
        gateway = await enter(GatewaySide(link, f"g-{worker_id}").running())
        await enter(link.listen(subjects.HEARTBEAT, on_beat))
        started = await enter(process(nats_url, worker_id))
        await until(lambda: beats and beats[-1].state == pb.SERVICE_STATE_READY, timeout_s=60)
        on_stage = Stage(link, None, beats[-1].worker, decode, gateway)  # type: ignore[arg-type]
        await on_stage.accepted(on_stage.request(list(range(100))))
        await until(lambda: decode.dones)
        pid = started.pid if victim == "worker" else _rank_pid(started.pid)

        os.kill(pid, signal.SIGTERM if victim == "worker" else signal.SIGKILL)
        code = await asyncio.wait_for(started.wait(), 30)
        await until(lambda: beats[-1].state == pb.SERVICE_STATE_STOPPED)
        end = await on_stage.end()

    assert end.failure.kind == pb.FAILURE_KIND_WORKER_LOST
    assert (code == 0) == (victim == "worker")


def _rank_pid(parent: int) -> int:
    """The one child that is not multiprocessing's resource tracker."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (rank,) = [
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return rank
