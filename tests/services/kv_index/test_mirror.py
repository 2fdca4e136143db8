import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from redis.asyncio import Redis

from services.kv_index.events import DEVICE_BIT, HOST_BIT, Change, End, Life, blocks
from services.kv_index.index import Index
from services.kv_index.mirror import Mirror
from services.kv_index.store import Store
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash
from shared.block_journal import BlockJournal
from shared.tasks import background
from tests.local_server import LocalServer


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
            await until(known)
            await redis.flushall()
            await until(written)

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

            await until(known)
            copied[last] = End.STOPPED
            await store.note_over({last: End.STOPPED})
            await until(learnt)
            assert await known()
            assert list(await store.over()) == list(copied)


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(5):
        while True:
            if await is_true():
                return
            await asyncio.sleep(0.01)
