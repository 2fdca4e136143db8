import asyncio
import uuid
from dataclasses import replace

from services.kv_index.config import KvIndexConfig
from services.kv_index.events import Life
from services.kv_index.repair import pause_s
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash
from shared.bus import Bus
from tests.services.kv_index.fake_worker import FakeWorker
from tests.services.kv_index.served import (
    eventually,
    figures,
    hits,
    serving,
    until,
)


def test_a_first_drift_is_healed_at_once_and_one_that_stays_ever_more_rarely() -> None:
    """But never given up: a worker may drift again before its digests have agreed."""
    pauses = [pause_s(num_heals) for num_heals in (0, 1, 2, 3, 7, 100_000)]

    assert pauses == [0, 1, 2, 4, 60, 60]


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
