import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from services.kv_index.events import DEVICE_BIT, GONE, HOST_BIT, Life
from services.kv_index.index import Delta
from services.kv_index.store import Store, StoreAway
from shared.block_hash import BlockHash
from tests.local_server import LocalServer

A, B, C = (BlockHash(letter * 16) for letter in (b"a", b"b", b"c"))
EPOCH = 1_790_000_000_123_456_789  # as in production: beyond 2**53


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    async with aclosing(Store(redis_url)) as store:
        yield store


@pytest.fixture
def life() -> Life:
    return Life(f"w-{uuid.uuid4().hex}", EPOCH)


async def load(store: Store, worker_id: str) -> Delta | None:
    loaded = [whole for whole in await store.load() if whole.life.worker_id == worker_id]
    return loaded[0] if loaded else None


async def test_what_is_appended_is_loaded(store: Store, life: Life) -> None:
    """Tiers, removals and the sequence, byte for byte."""
    assert await store.append(Delta(life, 0, 1, {A: DEVICE_BIT, B: DEVICE_BIT | HOST_BIT}))
    assert await store.append(Delta(life, 1, 2, {A: GONE, C: HOST_BIT}))

    expected = Delta(life, None, 2, {B: DEVICE_BIT | HOST_BIT, C: HOST_BIT})
    assert await load(store, life.worker_id) == expected
    assert await store.sequences([life]) == {life: 2}


async def test_a_slow_replica_cannot_undo_a_fast_one(store: Store, life: Life) -> None:
    """Two kv_index write the same steps; the copy takes each once, in order."""
    steps = [Delta(life, 0, 1, {A: DEVICE_BIT}), Delta(life, 1, 2, {A: GONE, B: DEVICE_BIT})]
    for step in [*steps, *steps]:
        assert await store.append(step)

    assert await load(store, life.worker_id) == Delta(life, None, 2, {B: DEVICE_BIT})


async def test_a_step_that_skips_one_is_refused_until_the_whole_comes(
    store: Store, life: Life
) -> None:
    """So a copy is exact at its sequence, whatever was missed while Redis was away."""
    await store.append(Delta(life, 0, 1, {A: DEVICE_BIT}))

    assert not await store.append(Delta(life, 2, 3, {C: DEVICE_BIT}))
    assert await store.append(Delta(life, None, 3, {B: DEVICE_BIT, C: DEVICE_BIT}))
    assert await store.append(Delta(life, None, 2, {A: DEVICE_BIT})), "older: nothing to do"

    expected = Delta(life, None, 3, {B: DEVICE_BIT, C: DEVICE_BIT})
    assert await load(store, life.worker_id) == expected


async def test_one_write_ends_a_life(store: Store, life: Life) -> None:
    """A restart moves the epoch; epochs one nanosecond apart are told apart."""
    await store.append(Delta(life, 0, 1, {A: DEVICE_BIT}))
    later = Life(life.worker_id, life.epoch + 1)

    assert await store.append(Delta(later, None, 0, {}))
    assert await store.append(Delta(life, 1, 2, {B: DEVICE_BIT})), "a past life is done with"

    assert await load(store, life.worker_id) == Delta(later, None, 0, {})
    assert await store.sequences([life]) == {life: 0}, "the old blocks are gone from Redis"


async def test_retiring_a_past_life_leaves_the_present_one(store: Store, life: Life) -> None:
    """A replica that was slow to notice the restart must not remove the restarted worker."""
    later = Life(life.worker_id, life.epoch + 1)
    await store.append(Delta(later, 0, 1, {A: DEVICE_BIT}))

    await store.retire(life)
    assert await load(store, life.worker_id) is not None

    await store.retire(later)
    assert await load(store, life.worker_id) is None


async def test_a_large_life_is_loaded_whole(store: Store, life: Life) -> None:
    """Reading goes in pieces; so must nothing be lost between them."""
    blocks = {BlockHash(i.to_bytes(16, "big")): DEVICE_BIT for i in range(20_000)}
    await store.append(Delta(life, 0, 1, blocks))

    assert await load(store, life.worker_id) == Delta(life, None, 1, blocks)


async def test_a_dead_redis_is_told_at_once(redis_server: LocalServer, life: Life) -> None:
    """The library alone would try for five seconds."""
    async with aclosing(Store(f"redis://{redis_server.address}/0")) as store:
        await store.append(Delta(life, 0, 1, {A: DEVICE_BIT}))
        redis_server.kill()

        for call in (store.load(), store.append(Delta(life, 1, 2, {})), store.sequences([])):
            with pytest.raises(StoreAway):
                await call
