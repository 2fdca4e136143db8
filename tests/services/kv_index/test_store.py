import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from redis.asyncio import Redis

from services.kv_index.events import DEVICE_BIT, HOST_BIT, Change, Life, blocks
from services.kv_index.holdings import Delta
from services.kv_index.store import Store, StoreAway
from tests.local_server import LocalServer

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
EPOCH = 1_790_000_000_123_456_789  # as in production: beyond 2**53
Copy = tuple[Life, int, dict[bytes, int]]


def on_device(*hashes: bytes) -> Change:
    return Change(DEVICE_BIT, True, b"".join(hashes))


def off_device(*hashes: bytes) -> Change:
    return Change(DEVICE_BIT, False, b"".join(hashes))


def on_host(*hashes: bytes) -> Change:
    return Change(HOST_BIT, True, b"".join(hashes))


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    async with aclosing(Store(redis_url)) as store:
        yield store


@pytest.fixture
def life() -> Life:
    return Life(f"w-{uuid.uuid4().hex}", EPOCH)


async def load(store: Store, worker_id: str) -> Copy | None:
    """The copy of a worker, as a mapping: sets have no order."""
    for whole in await store.load():
        if whole.life.worker_id == worker_id:
            return whole.life, whole.sequence, blocks(whole.changes)
    return None


async def test_what_is_appended_is_loaded(store: Store, life: Life) -> None:
    """Tiers, removals and the sequence, byte for byte."""
    assert await store.append(Delta(life, 0, 1, (on_device(A, B), on_host(B))))
    assert await store.append(Delta(life, 1, 2, (off_device(A), on_host(C))))

    expected = {B: DEVICE_BIT | HOST_BIT, C: HOST_BIT}
    assert await load(store, life.worker_id) == (life, 2, expected)
    assert await store.sequences([life]) == {life: 2}


async def test_a_slow_replica_cannot_undo_a_fast_one(store: Store, life: Life) -> None:
    """Two kv_index write the same steps; the copy takes each once, in order."""
    first = Delta(life, 0, 1, (on_device(A),))
    steps = [first, Delta(life, 1, 2, (off_device(A), on_device(B)))]
    for step in [*steps, *steps]:
        assert await store.append(step)

    assert await load(store, life.worker_id) == (life, 2, {B: DEVICE_BIT})


async def test_a_step_that_skips_one_is_refused_until_the_whole_comes(
    store: Store, life: Life
) -> None:
    """So a copy is exact at its sequence, whatever was missed while Redis was away."""
    await store.append(Delta(life, 0, 1, (on_device(A),)))

    assert not await store.append(Delta(life, 2, 3, (on_device(C),)))
    assert await store.append(Delta(life, None, 3, (on_device(B, C),)))
    assert await store.append(Delta(life, None, 2, (on_device(A),))), "older: nothing to do"

    expected = {B: DEVICE_BIT, C: DEVICE_BIT}
    assert await load(store, life.worker_id) == (life, 3, expected)


async def test_one_write_ends_a_life(store: Store, life: Life) -> None:
    """A restart moves the epoch; epochs one nanosecond apart are told apart."""
    await store.append(Delta(life, 0, 1, (on_device(A),)))
    later = Life(life.worker_id, life.epoch + 1)

    assert await store.append(Delta(later, None, 0, ()))
    assert await store.append(Delta(life, 1, 2, (on_device(B),))), "a past life is done with"

    assert await load(store, life.worker_id) == (later, 0, {})
    assert await store.sequences([life]) == {life: 0}, "the old blocks are gone from Redis"


async def test_retiring_a_past_life_leaves_the_present_one(store: Store, life: Life) -> None:
    """A replica that was slow to notice the restart must not remove the restarted worker."""
    later = Life(life.worker_id, life.epoch + 1)
    await store.append(Delta(later, 0, 1, (on_device(A),)))

    await store.retire(life)
    assert await load(store, life.worker_id) is not None

    await store.retire(later)
    assert await load(store, life.worker_id) is None


async def test_a_large_life_is_loaded_whole(store: Store, life: Life) -> None:
    """Reading goes in pieces; so must nothing be lost between them."""
    hashes = [i.to_bytes(16, "big") for i in range(20_000)]
    await store.append(Delta(life, None, 1, (on_device(*hashes),)))

    assert await load(store, life.worker_id) == (life, 1, dict.fromkeys(hashes, DEVICE_BIT))


async def test_a_whole_life_replaces_what_was_there(store: Store, life: Life) -> None:
    """Also by nothing: a worker that cleared all."""
    await store.append(Delta(life, 0, 1, (on_device(A), on_host(A, B))))
    assert await store.append(Delta(life, None, 2, (on_host(C),)))
    assert await load(store, life.worker_id) == (life, 2, {C: HOST_BIT})

    assert await store.append(Delta(life, None, 3, ()))
    assert await load(store, life.worker_id) == (life, 3, {})


async def test_a_life_that_nobody_follows_leaves_redis_by_itself(
    store: Store, life: Life, redis_url: str
) -> None:
    """Its memory is bounded also when every kv_index is gone; a comparison keeps it longer."""
    await store.append(Delta(life, None, 1, (on_device(A),)))
    await store.append(Delta(life, 1, 2, (on_host(A),)))

    async with aclosing(Redis.from_url(redis_url)) as redis:
        keys = [key async for key in redis.scan_iter(f"farspan:kv:v2:life:{life.worker_id}:*")]
        assert len(keys) == 3
        assert all([0 < await redis.ttl(key) <= 86_400 for key in keys])
        for key in keys:
            await redis.expire(key, 100)
        assert await store.sequences([life]) == {life: 2}
        assert all([await redis.ttl(key) > 100 for key in keys])


async def test_a_dead_redis_is_told_at_once(redis_server: LocalServer, life: Life) -> None:
    """The library alone would try for five seconds."""
    async with aclosing(Store(f"redis://{redis_server.address}/0")) as store:
        await store.append(Delta(life, 0, 1, (on_device(A),)))
        redis_server.kill()

        for call in (store.load(), store.append(Delta(life, 1, 2, ())), store.sequences([])):
            with pytest.raises(StoreAway):
                await call
