import os
import subprocess
import sys
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from services.kv_index import app
from services.kv_index.config import KvIndexConfig
from services.kv_index.events import Life
from services.local.servers import free_port, redis_command
from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import BlockHash
from shared.bus import Bus
from shared.errors import ConfigError
from tests.local_server import LocalServer
from tests.services.kv_index.fake_worker import FakeWorker
from tests.services.kv_index.served import (
    eventually,
    figures,
    hits,
    next_life,
    serving,
    sparse_batch,
    until,
)


async def test_events_become_hits(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """The whole way: NATS in, gRPC out."""
    async with serving(config) as client:
        worker = FakeWorker(link, life)
        await worker.store(chain[:6])
        await worker.store(chain[:8], pb.TIER_HOST)
        await worker.remove(chain[4:6])

        await eventually(client, chain, {life: (8, pb.TIER_HOST)})
        assert await hits(client, chain[:4]) == {life: (4, pb.TIER_DEVICE)}
        assert await hits(client, [BlockHash(uuid.uuid4().bytes), *chain]) == {}


async def test_a_new_epoch_drops_hits_here_and_after_a_restart(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """A heartbeat is enough; the copy in Redis must not bring the old blocks back (B1, B2)."""
    async with serving(config) as client:
        await FakeWorker(link, life).store(chain)
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})

        await FakeWorker(link, next_life(life)).beat()
        await eventually(client, chain, {})

    async with serving(config) as client:
        assert await hits(client, chain) == {}


async def test_a_stopped_worker_is_forgotten_at_once(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """It says so itself; nobody waits for its silence."""
    async with serving(config) as client:
        worker = FakeWorker(link, life)
        await worker.store(chain)
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})

        await worker.beat(pb.SERVICE_STATE_STOPPED)
        await eventually(client, chain, {})


async def test_late_events_do_not_bring_a_stopped_worker_back(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Its blocks would be hits for the ten minutes until its silence is noticed."""
    async with serving(config) as client:
        worker = FakeWorker(link, life)
        await worker.beat()
        await worker.beat(pb.SERVICE_STATE_STOPPED)

        async def late() -> object:
            await worker.store(chain)
            await worker.beat()
            return (await figures(config)).get("late_total", 0) > 1

        await until(late, True)
        assert await hits(client, chain) == {}


async def test_a_refused_worker_that_falls_silent_and_returns_is_refused_everywhere(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """No alarm for one that is gone, and an alarm again when it is back."""
    hasty = replace(config, forget_after_s=0.5)
    twin = replace(hasty, health_port=free_port())
    worker = FakeWorker(link, life, num_kept_batches=1)

    async def refused() -> object:
        return [(await figures(each)).get("refused_workers") for each in (hasty, twin)]

    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(hasty))
        await stack.enter_async_context(worker.answering())
        await worker.store(chain)
        await eventually(first, chain, {life: (10, pb.TIER_DEVICE)})
        await link.publish(subjects.BLOCK_EVENTS, sparse_batch(life, chain, sequence=2))
        await eventually(first, chain, {})
        second = await stack.enter_async_context(serving(twin))
        await until(refused, [0, 0])

        async def refused_when_back() -> object:
            await worker.beat()
            return await refused()

        await until(refused_when_back, [1, 1])
        assert await hits(first, chain) == await hits(second, chain) == {}
        assert worker.replays == []


async def test_a_silent_worker_is_forgotten_and_comes_back_whole(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Forgetting is cheap to be wrong about: a heartbeat brings everything back (B14)."""
    hasty = replace(config, forget_after_s=0.3)
    async with serving(hasty) as client, FakeWorker(link, life).answering() as worker:
        await worker.store(chain)
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})
        await eventually(client, chain, {})

        await worker.beat()
        await worker.beat()
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})


async def test_a_worker_with_other_blocks_is_left_out(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Its hashes would count tokens that it does not hold (B18)."""
    async with serving(config) as client:
        worker = FakeWorker(link, life)
        await worker.store(chain)
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})

        await worker.beat(block_tokens=512)
        await eventually(client, chain, {})
        await worker.remove(chain)

        async def refused() -> object:
            seen = await figures(config)
            return seen["refused_total"], seen["refused_workers"]

        await until(refused, (2, 1))
        await FakeWorker(link, next_life(life)).store(chain[:1])
        await eventually(client, chain, {next_life(life): (1, pb.TIER_DEVICE)})


async def test_a_replica_that_starts_leaves_out_whom_the_others_refused(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """A snapshot does not tell what was wrong with the events that led to it."""
    batch = sparse_batch(life, chain, sequence=1)
    other = Life(f"{life.worker_id}-b", life.epoch)
    worker = FakeWorker(link, life, num_kept_batches=1)

    async def refused() -> object:
        return (await figures(config)).get("refused_workers")

    async with worker.answering():
        async with serving(config):
            await link.publish(subjects.BLOCK_EVENTS, batch)
            await until(refused, 1)
        async with serving(config) as client:
            for _ in range(3):
                await worker.store(chain)
                await worker.beat()
            await FakeWorker(link, other).store(chain)
            await eventually(client, chain, {other: (10, pb.TIER_DEVICE)})
            assert worker.replays == []

            await FakeWorker(link, next_life(life)).beat()
            await until(refused, 0)
    async with serving(config):
        await until(refused, 0)


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_refused_worker_that_is_gone_is_no_alarm(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash], is_told: bool
) -> None:
    """Whether it said goodbye or fell silent; what is late of it still brings nothing back."""

    async def refused() -> object:
        return (await figures(config)).get("refused_workers")

    forget_after_s = 600.0 if is_told else 1.5
    async with serving(replace(config, forget_after_s=forget_after_s)) as client:
        worker = FakeWorker(link, life)
        await worker.beat(block_tokens=512)
        await until(refused, 1)
        if is_told:
            await worker.beat(pb.SERVICE_STATE_STOPPED)
        await until(refused, 0)

        await worker.store(chain)
        await FakeWorker(link, Life(f"{life.worker_id}-b", 1)).store(chain)
        await eventually(client, chain, {Life(f"{life.worker_id}-b", 1): (10, pb.TIER_DEVICE)})


async def test_sparse_events_put_a_worker_out_and_nothing_else(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Spans of a sliding window are no prefix (B17)."""
    batch = sparse_batch(life, chain, sequence=2)
    other = Life(f"{life.worker_id}-b", life.epoch)
    async with serving(config) as client:
        await FakeWorker(link, life).store(chain[:1])
        await FakeWorker(link, other).store(chain[:2])
        await link.publish(subjects.BLOCK_EVENTS, batch)

        await eventually(client, chain, {other: (2, pb.TIER_DEVICE)})


async def test_a_full_index_serves_what_it_has(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """And takes the rest when another worker has left."""
    other = Life(f"{life.worker_id}-b", life.epoch)
    async with (
        serving(replace(config, redis_url=f"{config.redis_url[:-1]}3", max_blocks=10)) as client,
        FakeWorker(link, life).answering() as worker,
    ):
        first = FakeWorker(link, other)
        await first.store([BlockHash(uuid.uuid4().bytes) for _ in range(7)])
        await worker.store(chain)
        await eventually(client, chain, {life: (3, pb.TIER_DEVICE)})

        await first.beat(pb.SERVICE_STATE_STOPPED)

        async def full() -> object:
            await worker.beat()
            return await hits(client, chain)

        await until(full, {life: (10, pb.TIER_DEVICE)})
        assert (await figures(config))["cut_blocks_total"] >= 7


async def test_a_refused_password_ends_the_start_even_if_redis_may_be_away(
    config: KvIndexConfig, tmp_path: Path
) -> None:
    """Waiting does not help against a wrong setting."""
    port = free_port()
    command = [*redis_command(port, tmp_path), "--requirepass", "secret"]
    server = LocalServer(command, port, tmp_path)
    try:
        server.start()
        for credentials in ("", ":wrong@"):
            url = f"redis://{credentials}{server.address}/0"
            with pytest.raises(ConfigError, match=server.address):
                async with app.serve(replace(config, redis_url=url, redis_required=False)):
                    pass
    finally:
        server.kill()


async def test_an_index_works_with_a_redis_that_asks_for_a_password(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash], tmp_path: Path
) -> None:
    """The user and the password stand in the URL; the next process is warm."""
    port = free_port()
    rights = ["on", ">secret", "~farspan:*", "+@all"]
    users = ["--requirepass", "everyone", "--user", "farspan", *rights]
    server = LocalServer([*redis_command(port, tmp_path), *users], port, tmp_path)
    try:
        server.start()
        for credentials in (":everyone", "farspan:secret"):
            life = next_life(life)
            own = replace(config, redis_url=f"redis://{credentials}@{server.address}/0")
            async with serving(own) as client:
                await FakeWorker(link, life).store(chain)
                await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})
            async with serving(own) as client:
                assert await hits(client, chain) == {life: (10, pb.TIER_DEVICE)}
    finally:
        server.kill()


@pytest.mark.parametrize("missing", ["NATS", "Redis"])
def test_the_process_does_not_start_without_its_servers(
    missing: str, nats_url: str, redis_url: str
) -> None:
    """One line that names what is missing and where it was expected, and exit code 2."""
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "KV_INDEX_NATS_URL": f"nats://{address}" if missing == "NATS" else nats_url,
        "KV_INDEX_REDIS_URL": f"redis://{address}" if missing == "Redis" else redis_url,
        "KV_INDEX_GRPC_ADDRESS": "127.0.0.1:0",
    }

    ended = subprocess.run(
        [sys.executable, "-m", "services.kv_index"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert ended.returncode == 2
    assert missing in ended.stderr.splitlines()[-1]
    assert address in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
