import asyncio
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from services.kv_index import app
from services.kv_index.config import KvIndexConfig
from services.kv_index.events import End, Life
from services.kv_index.holdings import Delta
from services.kv_index.store import Store
from services.local.servers import free_port, redis_command
from shared import bus, prefix_rpc, subjects
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash, pack
from shared.bus import Bus
from shared.errors import ConfigError
from shared.prefix_rpc import PrefixClient
from tests.local_server import LocalServer
from tests.services.kv_index.fake_worker import FakeWorker

Hits = dict[Life, tuple[int, pb.Tier]]


@pytest.fixture
async def config(nats_url: str, redis_url: str) -> KvIndexConfig:
    """In a Redis that all tests share: whom others' index left out is no matter of this one."""
    async with aclosing(Redis.from_url(redis_url)) as redis:
        await redis.delete("farspan:kv:v2:over")
    return KvIndexConfig(
        nats_url=nats_url,
        redis_url=redis_url,
        grpc_address="127.0.0.1:0",
        redis_check_interval_s=0.2,
        health_port=free_port(),
    )


@pytest.fixture
async def link(nats_url: str) -> AsyncIterator[Bus]:
    async with bus.connect(nats_url, "test") as link:
        yield link


@pytest.fixture
def life() -> Life:
    return Life(f"w-{uuid.uuid4().hex}", time.time_ns())


@pytest.fixture
def chain() -> list[BlockHash]:
    return [BlockHash(uuid.uuid4().bytes) for _ in range(10)]


async def figures(config: KvIndexConfig) -> dict[str, float]:
    """What Prometheus would read: its names and values."""
    url = f"http://127.0.0.1:{config.health_port}/metrics"
    async with httpx.AsyncClient() as client:
        text = (await client.get(url)).text
    values = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("farspan_kv_index_"): float(value) for name, value in values}


@asynccontextmanager
async def serving(config: KvIndexConfig) -> AsyncIterator[PrefixClient]:
    async with app.serve(config) as port, prefix_rpc.connect(f"127.0.0.1:{port}") as client:
        yield client


async def hits(client: PrefixClient, hashes: list[BlockHash]) -> Hits:
    query = pb.PrefixQuery(block_hashes=pack(hashes))
    answer = await client.longest_prefix(query, timeout_s=5)
    return {
        Life(hit.worker.worker_id, hit.worker.epoch): (hit.num_blocks, hit.tier)
        for hit in answer.hits
    }


async def eventually(client: PrefixClient, hashes: list[BlockHash], expected: Hits) -> None:
    """Events travel; the answer must become right, and soon."""
    await until(lambda: hits(client, hashes), expected)


async def until(read: Callable[[], Awaitable[object]], expected: object) -> None:
    seen: object = None
    try:
        async with asyncio.timeout(5):
            while True:
                seen = await read()
                if seen == expected:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"still {seen}, expected {expected}")


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


async def test_a_gap_is_healed_by_replay(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Three lost batches are asked for; what was known stays in use (B11)."""
    async with serving(config) as client, FakeWorker(link, life).answering() as worker:
        await worker.store(chain[:2])
        for i in range(2, 5):
            await worker.store(chain[i : i + 1], is_lost=True)
        await worker.store(chain[5:6])

        await eventually(client, chain, {life: (6, pb.TIER_DEVICE)})
        assert worker.replays == [2]


async def test_a_gap_beyond_the_workers_memory_is_healed_by_a_snapshot(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """The worker keeps two batches only and sends its whole state instead."""
    async with (
        serving(config) as client,
        FakeWorker(link, life, num_kept_batches=2).answering() as worker,
    ):
        await worker.store(chain[:8])
        await worker.remove(chain[5:8], is_lost=True)
        for _ in range(4):
            await worker.store(chain[:1], pb.TIER_HOST, is_lost=True)
        await worker.store(chain[1:2], pb.TIER_HOST)

        await eventually(client, chain, {life: (5, pb.TIER_DEVICE)})


async def test_a_lost_tail_is_healed_by_heartbeats(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """No event follows that would show the gap; an idle worker still beats."""
    async with serving(config) as client, FakeWorker(link, life).answering() as worker:
        await worker.store(chain[:2])
        await worker.store(chain[2:4], is_lost=True)
        await worker.beat()
        await worker.beat()

        await eventually(client, chain, {life: (4, pb.TIER_DEVICE)})


async def test_a_silent_replay_does_not_stop_the_next_try(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """A worker that cannot answer yet is asked again after its next heartbeat."""
    async with serving(config) as client:
        worker = FakeWorker(link, life)
        await worker.store(chain[:4], is_lost=True)
        await worker.beat()
        await worker.beat()
        async with worker.answering():
            await worker.beat()
            await eventually(client, chain, {life: (4, pb.TIER_DEVICE)})


async def test_a_restart_of_kv_index_is_warm(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """The blocks are there before any worker has said a word."""
    async with serving(config) as client:
        worker = FakeWorker(link, life)
        await worker.store(chain[:7])
        await eventually(client, chain, {life: (7, pb.TIER_DEVICE)})

    await worker.remove(chain[6:7])  # nobody listens: the next process must find out

    async with serving(config) as client, worker.answering():
        assert await hits(client, chain) == {life: (7, pb.TIER_DEVICE)}
        await worker.beat()
        await worker.beat()
        await eventually(client, chain, {life: (6, pb.TIER_DEVICE)})


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


def next_life(life: Life) -> Life:
    return Life(life.worker_id, life.epoch + 1)


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


async def test_a_stopped_worker_stays_gone_from_a_replica_that_starts(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """What is late of it would be hits there, and nowhere else."""
    other = Life(f"{life.worker_id}-b", life.epoch)
    worker = FakeWorker(link, life)
    async with serving(config) as client:
        await worker.store(chain[:5])
        await eventually(client, chain, {life: (5, pb.TIER_DEVICE)})
        await worker.beat(pb.SERVICE_STATE_STOPPED)
        await eventually(client, chain, {})

    async with serving(config) as client, worker.answering():
        await worker.store(chain[5:])
        await worker.beat()
        await FakeWorker(link, other).store(chain)
        await eventually(client, chain, {other: (10, pb.TIER_DEVICE)})
        assert worker.replays == []


async def test_an_end_that_is_not_understood_stops_no_replica(
    config: KvIndexConfig, redis_server: LocalServer, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Neither one that runs nor one that starts; the copy is written all the same."""
    own = replace(config, redis_url=f"redis://{redis_server.address}/0")
    async with serving(own) as client:
        async with aclosing(Redis.from_url(own.redis_url)) as redis:
            await redis.zadd("farspan:kv:v2:over", {"garbage": 1})
        await FakeWorker(link, life).store(chain)
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})
        async with aclosing(Store(own.redis_url)) as store:
            await store.note_over({life: End.STOPPED})
        await eventually(client, chain, {})
        await FakeWorker(link, next_life(life)).store(chain)
        await eventually(client, chain, {next_life(life): (10, pb.TIER_DEVICE)})

    async with serving(own) as client:
        assert await hits(client, chain) == {next_life(life): (10, pb.TIER_DEVICE)}


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_replica_that_missed_the_end_of_a_life_learns_of_it(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash], is_refused: bool
) -> None:
    """Messages are delivered at most once; the copy tells what another replica has heard."""
    twin = replace(config, health_port=0)
    worker = FakeWorker(link, life, num_kept_batches=1)
    async with serving(config) as client, worker.answering():
        await worker.store(chain)
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})
        async with aclosing(Store(config.redis_url)) as store:
            await store.note_over({life: End.REFUSED if is_refused else End.STOPPED})
        await eventually(client, chain, {})

        async def refused() -> object:
            await worker.beat()
            return (await figures(config))["refused_workers"]

        await until(refused, is_refused)
        async with serving(twin) as second:
            assert await hits(second, chain) == {}


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


async def test_silent_drift_is_healed_by_one_snapshot(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Nothing was lost, so no gap shows; the digest in the next heartbeat does (B9)."""
    async with serving(config) as client, FakeWorker(link, life).answering() as worker:
        await worker.store(chain)
        await worker.beat()
        await worker.forget(chain[3:])
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})

        await worker.beat()
        await eventually(client, chain, {life: (3, pb.TIER_DEVICE)})
        for _ in range(3):
            await worker.beat()
        await worker.store(chain[:5])
        await worker.beat()
        await eventually(client, chain, {life: (5, pb.TIER_DEVICE)})

        async def drifts() -> object:
            seen = await figures(config)
            return seen["drifts_total"], seen["snapshots_total"], seen["doubted_workers"]

        await until(drifts, (1, 1, 0))
        assert worker.replays == [0]

    async with serving(config) as client:
        assert await hits(client, chain) == {life: (5, pb.TIER_DEVICE)}, "the copy is healed too"


async def test_a_worker_that_computes_its_digest_wrongly_is_asked_less_and_less_often(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Each snapshot is tens of megabytes and changes nothing."""
    async with serving(config), FakeWorker(link, life).answering() as worker:
        worker.digest = bytes(32)
        await worker.store(chain)
        for _ in range(100):
            await worker.store([BlockHash(uuid.uuid4().bytes)])
            await worker.beat()
            await asyncio.sleep(0.02)

        assert worker.replays in ([0, 0], [0])


async def test_a_worker_that_claims_too_much_is_asked_for_few_snapshots(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Idle or busy; what it tells is followed all the same."""
    async with serving(config) as client, FakeWorker(link, life).answering() as worker:
        worker.sequence = 10**12
        await worker.store(chain[:9])
        for number in range(100):
            if number < 50:
                await worker.store([BlockHash(uuid.uuid4().bytes)])
            await worker.beat()
            await asyncio.sleep(0.02)

        assert worker.replays.count(0) in (1, 2)
        await worker.store(chain[9:])
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})


async def test_a_gap_that_is_not_filled_counts_as_one(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """However often a worker that does not answer is asked."""
    async with serving(config) as client:
        worker = FakeWorker(link, life)
        await worker.store(chain[:2], is_lost=True)
        await worker.store(chain[2:4])
        for _ in range(10):
            await worker.beat()
            await asyncio.sleep(0.02)
        async with worker.answering():
            await worker.beat()
            await eventually(client, chain, {life: (4, pb.TIER_DEVICE)})

            await worker.store(chain[4:5], is_lost=True)
            await worker.store(chain[5:6])
            await eventually(client, chain, {life: (6, pb.TIER_DEVICE)})

        async def gaps() -> object:
            seen = await figures(config)
            return seen["gaps_total"]

        await until(gaps, 2)


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


def sparse_batch(life: Life, chain: list[BlockHash], sequence: int) -> pb.BlockEvents:
    """Blocks of another size than ours: they stand for four times as many tokens."""
    sparse = pb.BlocksStored(tier=pb.TIER_DEVICE, block_hashes=pack(chain), num_tokens=64 * 40)
    return pb.BlockEvents(
        worker=pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch),
        sequence=sequence,
        events=[pb.BlockEvent(stored=sparse)],
    )


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


async def test_a_worker_that_works_in_silence_shows(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """A metric and a line in the log, until its first block (B12)."""

    async def mute() -> object:
        return (await figures(config)).get("mute_workers")

    async with serving(replace(config, mute_after_s=0.05)):
        worker = FakeWorker(link, life)
        for _ in range(2):
            await worker.beat(num_running=1)
            await asyncio.sleep(0.1)
        await until(mute, 1)

        await worker.store(chain)
        await worker.beat(num_running=1)
        await until(mute, 0)


@pytest.mark.parametrize("is_over", [True, False])
async def test_a_worker_whose_clock_went_back_shows(
    config: KvIndexConfig,
    link: Bus,
    life: Life,
    chain: list[BlockHash],
    is_over: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not heard before its clock has caught up with what is known: that is told."""
    hour_ns = 3600 * 10**9
    worker = FakeWorker(link, Life(life.worker_id, life.epoch - hour_ns))

    async def shadowed() -> object:
        await worker.beat()
        return (await figures(config)).get("shadowed_workers")

    async with serving(replace(config, mute_after_s=0.5)) as client, worker.answering():
        before = FakeWorker(link, life)
        await before.beat(pb.SERVICE_STATE_STOPPED if is_over else pb.SERVICE_STATE_READY)
        await worker.store(chain)
        await until(shadowed, 1)
        told = [each.message for each in caplog.records if each.levelname == "ERROR"]
        assert len(told) == 1 and life.worker_id in told[0]

        reborn = FakeWorker(link, next_life(life))
        await reborn.store(chain)
        await eventually(client, chain, {next_life(life): (10, pb.TIER_DEVICE)})

        async def ended() -> object:
            return (await figures(config)).get("shadowed_workers")

        await until(ended, 0)


async def test_a_worker_whose_clock_went_back_is_heard_when_its_later_life_has_been_silent(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """A life that did not say goodbye may return, and ends the earlier one then."""
    later = next_life(life)
    async with (
        serving(replace(config, forget_after_s=0.5)) as client,
        FakeWorker(link, life).answering() as worker,
    ):
        await FakeWorker(link, later).beat()
        await worker.store(chain)
        assert await hits(client, chain) == {}

        async def heard() -> object:
            await worker.beat()
            return await hits(client, chain)

        await until(heard, {life: (10, pb.TIER_DEVICE)})
        await FakeWorker(link, later).store(chain[:3])
        await eventually(client, chain, {later: (3, pb.TIER_DEVICE)})


@pytest.mark.parametrize("state", [pb.SERVICE_STATE_READY, pb.SERVICE_STATE_STOPPED])
async def test_an_epoch_in_the_far_future_is_not_believed(
    config: KvIndexConfig,
    link: Bus,
    life: Life,
    chain: list[BlockHash],
    state: pb.ServiceState,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One such message, or what an earlier version wrote of it, would end the id for ever."""
    absurd = Life(life.worker_id, 2**64 - 1)
    async with aclosing(Store(config.redis_url)) as store:
        await store.note_over({absurd: End.STOPPED})
        await store.append(Delta(absurd, None, 1, ()))

    async def ahead() -> object:
        return (await figures(config)).get("ahead_workers")

    async with serving(config) as client:
        await FakeWorker(link, absurd).beat(state)
        await FakeWorker(link, absurd).store(chain)
        await until(ahead, 1)
        assert "2554" in caplog.text and life.worker_id in caplog.text

        await FakeWorker(link, life).store(chain)
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})
    async with serving(config) as client:
        assert await hits(client, chain) == {life: (10, pb.TIER_DEVICE)}, "the copy is its own"


async def test_a_clock_that_is_an_hour_ahead_is_believed(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Clocks differ, and nobody knows whose is right."""
    ahead = Life(life.worker_id, life.epoch + 3600 * 10**9)
    async with serving(config) as client:
        await FakeWorker(link, ahead).store(chain)
        await eventually(client, chain, {ahead: (10, pb.TIER_DEVICE)})


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


async def test_trouble_shows_without_any_traffic(
    config: KvIndexConfig, redis_server: LocalServer
) -> None:
    """A figure may be looked at when nobody works."""
    own = replace(config, redis_url=f"redis://{redis_server.address}/0")

    async def redis_up() -> object:
        return (await figures(own)).get("redis_up")

    async with serving(own):
        await until(redis_up, 1)
        redis_server.kill()
        await until(redis_up, 0)
        redis_server.start()
        await until(redis_up, 1)


async def test_a_worker_of_which_something_is_missing_shows_until_it_is_whole(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Left out for room, lost and not replayed, or drifted: each has its figure."""
    own = replace(config, redis_url=f"{config.redis_url[:-1]}4", max_blocks=8)
    worker = FakeWorker(link, life)
    names = ("cut_workers", "gap_workers", "drifted_workers")

    async def missing() -> object:
        seen = await figures(own)
        return [seen.get(name) for name in names]

    async with serving(own):
        await worker.store(chain)
        await until(missing, [1, 0, 0])
        await worker.remove(chain[5:])
        await until(missing, [0, 0, 0])
        worker.digest = bytes(32)
        await worker.beat()
        await until(missing, [0, 0, 1])
        worker.digest = None
        await worker.beat()
        await worker.store(chain[5:6], is_lost=True)
        await worker.store(chain[6:7])
        await until(missing, [0, 1, 0])


async def test_redis_may_die_and_come_back_empty(
    config: KvIndexConfig,
    redis_server: LocalServer,
    link: Bus,
    life: Life,
    chain: list[BlockHash],
) -> None:
    """Queries go on from memory, and later the copy is whole again without any new event (D8)."""
    own = replace(config, redis_url=f"redis://{redis_server.address}/0")
    async with serving(own) as client:
        worker = FakeWorker(link, life)
        await worker.store(chain[:3])
        await eventually(client, chain, {life: (3, pb.TIER_DEVICE)})

        redis_server.kill()
        await worker.store(chain[3:9])
        await eventually(client, chain, {life: (9, pb.TIER_DEVICE)})
        redis_server.start()

        async def copied() -> object:
            async with serving(replace(own, health_port=0)) as second:
                return await hits(second, chain)

        await until(copied, {life: (9, pb.TIER_DEVICE)})


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_restart_while_redis_is_away_is_cold_and_writes_the_copy_later(
    config: KvIndexConfig,
    redis_server: LocalServer,
    link: Bus,
    life: Life,
    chain: list[BlockHash],
    is_silent: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody listens, or what listens stands still: workers tell what they hold."""
    own = replace(config, redis_url=f"redis://{redis_server.address}/0", redis_required=False)
    worker = FakeWorker(link, life)
    await worker.store(chain)
    if is_silent:
        redis_server.pause()
    else:
        redis_server.kill()
    async with serving(own) as client, worker.answering():
        await worker.beat()
        await worker.beat()
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})
        assert redis_server.address in caplog.text

        async def readiness() -> object:
            async with httpx.AsyncClient() as probe:
                answer = await probe.get(f"http://127.0.0.1:{own.health_port}/readyz")
            return answer.status_code, "Redis is away" in answer.text

        assert await readiness() == (200, True)

        async def redis_up() -> object:
            return (await figures(own))["redis_up"]

        await until(redis_up, 0)
        if is_silent:
            redis_server.go_on()
        else:
            redis_server.start()
        await until(redis_up, 1)

    async with serving(own) as client:
        assert await hits(client, chain) == {life: (10, pb.TIER_DEVICE)}


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


async def test_two_replicas_agree(
    config: KvIndexConfig, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Both follow the events and both write the copy; losses and one's absence change nothing."""
    choice = random.Random(7)
    twin = replace(config, health_port=0)
    async with serving(config) as first, AsyncExitStack() as stack:
        lives = [Life(f"{life.worker_id}-{i}", life.epoch) for i in range(3)]
        fakes = [FakeWorker(link, each, num_kept_batches=6).answering() for each in lives]
        workers = [await stack.enter_async_context(fake) for fake in fakes]
        held = dict.fromkeys(range(3), 0)
        for step in range(120):
            if step == 40:
                second = await stack.enter_async_context(serving(twin))
            number, is_lost = choice.randrange(3), choice.random() < 0.3
            worker, num_held = workers[number], choice.randint(0, 10)
            if num_held > held[number]:
                await worker.store(chain[held[number] : num_held], is_lost=is_lost)
            else:
                await worker.remove(chain[num_held : held[number]], is_lost=is_lost)
            held[number] = num_held
            if choice.random() < 0.2:
                await worker.beat()
        for worker in workers:
            await worker.beat()
            await worker.beat()

        expected: Hits = {
            lives[number]: (num_held, pb.TIER_DEVICE)
            for number, num_held in held.items()
            if num_held
        }
        for client in (first, second):
            await eventually(client, chain, expected)

    async with serving(config) as client:
        assert await hits(client, chain) == expected


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


async def test_a_flushed_redis_is_written_again(
    config: KvIndexConfig, redis_server: LocalServer, link: Bus, life: Life, chain: list[BlockHash]
) -> None:
    """Nobody tells that it was flushed: a comparison finds out."""
    own = replace(config, redis_url=f"redis://{redis_server.address}/0")
    async with serving(own) as client:
        await FakeWorker(link, life).store(chain)
        await eventually(client, chain, {life: (10, pb.TIER_DEVICE)})
        async with aclosing(Redis.from_url(own.redis_url)) as redis:
            await redis.flushall()

        async def copied() -> object:
            async with serving(replace(own, health_port=0)) as second:
                return await hits(second, chain)

        await until(copied, {life: (10, pb.TIER_DEVICE)})


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
