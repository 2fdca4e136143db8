import asyncio
import random
import uuid
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import httpx
import pytest
from redis.asyncio import Redis

from services.kv_index.config import KvIndexConfig
from services.kv_index.events import DEVICE_BIT, HOST_BIT, Change, End, Life, blocks
from services.kv_index.index import Index
from services.kv_index.mirror import Mirror
from services.kv_index.store import Store
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash
from shared.block_journal import BlockJournal
from shared.bus import Bus
from shared.tasks import background
from tests.local_server import LocalServer
from tests.services.kv_index.fake_worker import FakeWorker
from tests.services.kv_index.served import (
    Hits,
    eventually,
    figures,
    hits,
    next_life,
    serving,
    until,
)


async def test_more_steps_than_may_wait_are_copied_as_a_whole(redis_url: str) -> None:
    """A slow Redis costs a bounded amount of memory, and no block."""
    life = Life(f"w-{uuid.uuid4().hex}", 5)
    journal = BlockJournal(pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch))
    index = Index()
    async with aclosing(Store(redis_url)) as store:
        mirror = Mirror(index, store, check_interval_s=60)
        for _ in range(1500):
            journal.stored(pb.TIER_HOST, [BlockHash(uuid.uuid4().bytes)])
            batch = journal.commit()
            assert batch is not None
            mirror.append(index.apply(batch))

        await mirror.write()

        (copied,) = [whole for whole in await store.load() if whole.life == life]
        whole = index.whole(life)
        assert whole is not None and copied.sequence == whole.sequence == 1500
        assert blocks(copied.changes) == blocks(whole.changes)


async def copy_of(store: Store, life: Life) -> dict[bytes, int]:
    (copied,) = [whole for whole in await store.load() if whole.life == life]
    return blocks(copied.changes)


@pytest.mark.parametrize("is_tried", [False, True])
async def test_what_was_healed_during_an_outage_is_copied_after_it(
    redis_server: LocalServer, is_tried: bool
) -> None:
    """A heal keeps its sequence, so comparing sequences finds nothing; tried or not yet tried."""
    life = Life("w", 5)
    index = Index()
    async with aclosing(Store(f"redis://{redis_server.address}/0")) as store:
        mirror = Mirror(index, store, check_interval_s=60)
        mirror.append(index.restore(life, 3, [Change(DEVICE_BIT, True, b"a" * 16)]))
        await mirror.write()

        redis_server.pause()
        mirror.append(index.restore(life, 3, [Change(DEVICE_BIT, True, b"b" * 16)]))
        for _ in range(2 * is_tried):  # the step is given up, then the whole life
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await mirror.write()
        mirror.note_away("it stands still")
        redis_server.go_on()
        await mirror.write()

        assert await copy_of(store, life) == {b"b" * 16: DEVICE_BIT}


@pytest.mark.parametrize("lost", ["epochs", "sequence", "device", "host", "device, busy"])
async def test_a_key_that_redis_evicts_is_written_again(
    redis_server: LocalServer, lost: str
) -> None:
    """Nobody tells that it is gone; and a step that follows may begin it anew."""
    life = Life("w", 5)
    index, key = Index(), lost.split(",")[0]
    changes = [Change(DEVICE_BIT, True, b"a" * 16), Change(HOST_BIT, True, b"b" * 16)]
    url = f"redis://{redis_server.address}/0"
    async with aclosing(Store(url)) as store, aclosing(Redis.from_url(url)) as redis:
        mirror = Mirror(index, store, check_interval_s=0.01)
        mirror.append(index.restore(life, 3, changes))
        mirror.append(index.restore(Life("idle", 7), 0, []))
        async with background(mirror.run()):

            async def num_copied() -> int:
                async with asyncio.timeout(5):
                    while True:
                        if await store.extents(index.extents) == index.extents:
                            lives = await store.load()
                            assert {whole.life for whole in lives} == index.extents.keys()
                            return sum(len(blocks(whole.changes)) for whole in lives)
                        await asyncio.sleep(0.01)

            assert await num_copied() == 2
            await redis.delete(*[name async for name in redis.scan_iter(f"farspan:*{key}")])
            if lost.endswith("busy"):
                mirror.append(index.apply(one_more(life)))
            assert await num_copied() == index.num_blocks


def one_more(life: Life) -> pb.BlockEvents:
    event = pb.BlocksStored(tier=pb.TIER_DEVICE, block_hashes=b"c" * 16, num_tokens=64)
    worker = pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch)
    return pb.BlockEvents(worker=worker, sequence=4, events=[pb.BlockEvent(stored=event)])


async def test_a_retired_life_leaves_the_copy(redis_url: str) -> None:
    """Also when a step of it was still waiting."""
    life = Life(f"w-{uuid.uuid4().hex}", 5)
    index = Index()
    async with aclosing(Store(redis_url)) as store:
        mirror = Mirror(index, store, check_interval_s=60)
        mirror.append(index.heartbeat(life, 0))
        await mirror.write()
        assert life in [whole.life for whole in await store.load()]

        mirror.append(index.restore(life, 3, [Change(DEVICE_BIT, True, bytes(16))]))
        index.retire(life, End.SILENT)
        mirror.retire(life)
        await mirror.write()

        assert life not in [whole.life for whole in await store.load()]


async def test_every_replica_remembers_every_end_and_writes_it_again(
    redis_server: LocalServer,
) -> None:
    """Also of a life it never followed: Redis may lose it after whoever saw it is gone."""
    life, url = Life("w", 5), f"redis://{redis_server.address}/0"
    ends = {life: End.STOPPED, Life("x", 7): End.REFUSED}
    index = Index()
    async with aclosing(Store(url)) as store, aclosing(Redis.from_url(url)) as redis:
        mirror = Mirror(index, store, check_interval_s=0.01)
        async with background(mirror.run()):

            async def known() -> bool:
                return index.over == ends

            async def written() -> bool:
                return await store.over() == ends

            await store.note_over(ends)
            await until(known, True)
            await redis.flushall()
            await until(written, True)

    assert index.apply(one_more(life)) is None


async def test_more_ends_than_a_replica_remembers_are_left_as_they_are(
    redis_server: LocalServer,
) -> None:
    """The newest are learnt once; nothing is written for ever."""
    url = f"redis://{redis_server.address}/0"
    index = Index()
    async with aclosing(Store(url)) as store:
        for first in (0, 3000):
            lives = [Life(f"w-{first + number}", 5) for number in range(3000)]
            await store.note_over(dict.fromkeys(lives, End.STOPPED))
        copied = await store.over()
        mirror = Mirror(index, store, check_interval_s=0.01)
        async with background(mirror.run()):
            last = Life("last", 5)

            async def known() -> bool:
                return index.over.keys() == set(list(copied)[-4096:])

            async def learnt() -> bool:
                return index.is_over(last)

            await until(known, True)
            copied[last] = End.STOPPED
            await store.note_over({last: End.STOPPED})
            await until(learnt, True)
            assert await known()
            assert list(await store.over()) == list(copied)


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
