"""The worker as the fleet sees it, and as an operator starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.decode import app
from services.decode.config import DecodeConfig
from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import unpack
from shared.errors import ConfigError, WorkerLost
from tests.services.decode.conftest import StartStage
from tests.services.decode.prefill_side import CHECKPOINT
from tests.services.decode.test_life import prompt, until

ROOT = Path(__file__).parents[3]


async def test_the_heartbeat_tells_budgets_and_limits(stage: StartStage) -> None:
    async with stage(max_concurrent=3) as running:
        side, capacity = running.side, running.service.capacity
        await side.accepted(side.offer("r", prompt(100), max_new_tokens=50))
        await until(lambda: side.beats and side.beats[-1].load.waiting_tokens)

        beat = side.beats[-1]
        assert (beat.role, beat.state) == (pb.ROLE_DECODE, pb.SERVICE_STATE_READY)
        assert beat.worker == running.service.rank.worker
        assert beat.layout.row_bytes == side.source.layout.row_bytes
        assert beat.limits.max_concurrent == 3
        assert beat.limits.max_sequence_tokens == capacity.host_pages * 64
        assert beat.limits.max_whole_pages == 6  # 256 hot rows and two tail pages
        assert beat.limits.leased_device_pages == 6
        assert beat.load.waiting_tokens == 100
        assert beat.load.free_blocks == beat.load.total_blocks - 3
        assert beat.load.free_index_pages == beat.load.total_index_pages - 3
        assert beat.load.free_device_pages == beat.load.total_device_pages - 3


async def test_events_are_replayed(stage: StartStage) -> None:
    """kv_index asks when it has missed some; another life's are not here."""
    async with stage() as running:
        side, worker = running.side, running.service.rank.worker
        await side.serve(side.offer("r", prompt(130)))
        request = pb.ReplayRequest(worker=worker, from_sequence=0)

        reply = await side.bus.request(
            subjects.REPLAY, request, timeout_s=5, worker=worker.worker_id
        )

        assert len(unpack(reply.snapshot.host_block_hashes)) == 2
        request.worker.epoch -= 1
        with pytest.raises(WorkerLost):
            await side.bus.request(subjects.REPLAY, request, timeout_s=5, worker=worker.worker_id)


async def test_a_missing_checkpoint_is_named(nats_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        async with app.serve(DecodeConfig(nats_url=nats_url, checkpoint=tmp_path)):
            pass


def test_a_process_without_nats_says_so_and_exits() -> None:
    environ = {"DECODE_NATS_URL": "nats://127.0.0.1:1", "DECODE_CHECKPOINT": str(CHECKPOINT)}

    done = subprocess.run(
        [sys.executable, "-m", "services.decode"],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 2
    assert "no NATS server at 127.0.0.1:1" in done.stderr
