import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.kv_index.events import DEVICE_BIT, HOST_BIT, Change, End, Life, blocks
from services.kv_index.holdings import Delta, Extent
from services.kv_index.store import Store, StoreAway, StoreRefused
from services.local.servers import free_port, redis_command
from shared.access import Access
from shared.errors import ConfigError
from tests.local_server import LocalServer
from tests.tls_front import tls_front

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


async def test_lives_that_are_over_are_remembered(store: Store, life: Life) -> None:
    """With the reason; a worker's id may hold any character."""
    other = Life(f"{life.worker_id}:b", EPOCH)
    await store.note_over({life: End.REFUSED, other: End.REFUSED})
    await store.note_over({life: End.STOPPED})

    over = await store.over()
    assert (over[life], over[other]) == (End.STOPPED, End.REFUSED)


async def test_a_bounded_number_of_lives_that_are_over_is_remembered(
    redis_server: LocalServer,
) -> None:
    """The oldest are forgotten: what is late of a life comes within seconds."""
    async with aclosing(Store(f"redis://{redis_server.address}/0")) as store:
        for first in (0, 5000):
            lives = [Life(f"w-{first + number}", EPOCH) for number in range(5000)]
            await store.note_over(dict.fromkeys(lives, End.STOPPED))

        over = await store.over()
        assert len(over) == 8192
        assert over.keys() > set(lives)


async def test_what_cannot_be_read_is_skipped_and_told_once(
    redis_server: LocalServer, life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    """A later version's word, or somebody's hand, in any key; what is written again is whole."""
    url = f"redis://{redis_server.address}/0"
    async with aclosing(Store(url)) as store, aclosing(Redis.from_url(url)) as redis:
        await store.note_over({life: End.STOPPED})
        strange = ["garbage", b"\xff\xfe:1:2", "x:stopped:w", f"{EPOCH:020}:merged:w", ""]
        await redis.zadd("farspan:kv:v2:over", dict.fromkeys(strange, 1))
        for _ in range(3):
            assert await store.over() == {life: End.STOPPED}
        assert len(caplog.records) == 1 and "5 " in caplog.text

        await store.append(Delta(life, None, 3, (on_device(A),)))
        await redis.sadd(f"farspan:kv:v2:life:{life.worker_id}:{EPOCH:020}:device", "short")
        strange_epochs = {"w": "garbage", b"\xff": f"{EPOCH:020}", life.worker_id: f"{EPOCH:020}"}
        await redis.hset("farspan:kv:v2:epochs", mapping=strange_epochs)
        assert await load(store, life.worker_id) == (life, 3, {A: DEVICE_BIT})
        await redis.set(f"farspan:kv:v2:life:{life.worker_id}:{EPOCH:020}:sequence", "garbage")
        assert await load(store, life.worker_id) == (life, 0, {A: DEVICE_BIT})
        assert await store.extents([life]) == {life: Extent(0, 2)}

        other = Life("w", EPOCH)
        await store.append(Delta(other, None, 1, (on_device(B),)))
        assert await load(store, "w") == (other, 1, {B: DEVICE_BIT})


@pytest.mark.parametrize("sequence", ["zzz", "z" * 20, "9" * 20, str(2**64), "9" * 5000, ""])
@pytest.mark.parametrize("epoch", ["z" * 20, "9" * 20, f"{EPOCH:020}"])
async def test_a_copy_that_somebody_spoilt_is_written_again(
    redis_server: LocalServer, life: Life, sequence: str, epoch: str
) -> None:
    """It compared as later than everything: the worker's copy was never right again."""
    url = f"redis://{redis_server.address}/0"
    async with aclosing(Store(url)) as store, aclosing(Redis.from_url(url)) as redis:
        await store.append(Delta(life, None, 3, (on_device(A),)))
        keys = f"farspan:kv:v2:life:{life.worker_id}:{EPOCH:020}"
        await redis.set(f"{keys}:sequence", sequence)
        await redis.hset("farspan:kv:v2:epochs", life.worker_id, epoch)

        assert await store.extents([life]) in ({}, {life: Extent(0, 1)})
        assert await store.append(Delta(life, None, 4, (on_device(A, B),)))

        assert await load(store, life.worker_id) == (life, 4, {A: DEVICE_BIT, B: DEVICE_BIT})


async def test_what_is_appended_is_loaded(store: Store, life: Life) -> None:
    """Tiers, removals and the sequence, byte for byte."""
    assert await store.append(Delta(life, 0, 1, (on_device(A, B), on_host(B))))
    assert await store.append(Delta(life, 1, 2, (off_device(A), on_host(C))))

    expected = {B: DEVICE_BIT | HOST_BIT, C: HOST_BIT}
    assert await load(store, life.worker_id) == (life, 2, expected)
    assert await store.extents([life]) == {life: Extent(2, 3)}


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
    assert await store.extents([life]) == {}, "the old blocks are gone from Redis"


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
    hashes = [uuid.uuid4().bytes for _ in range(20_000)]
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
        assert await store.extents([life]) == {life: Extent(2, 2)}
        assert all([await redis.ttl(key) > 100 for key in keys])


async def test_a_dead_redis_is_told_at_once(redis_server: LocalServer, life: Life) -> None:
    """The library alone would try for five seconds."""
    async with aclosing(Store(f"redis://{redis_server.address}/0")) as store:
        await store.append(Delta(life, 0, 1, (on_device(A),)))
        redis_server.kill()

        for call in (store.load(), store.append(Delta(life, 1, 2, ())), store.extents([])):
            with pytest.raises(StoreAway):
                await call


async def test_a_cancellation_is_never_lost(redis_url: str) -> None:
    """redis-py's own time limit swallows one that comes with an answer, and a stop then hangs."""

    async def ask() -> None:
        while True:
            await store.extents([])

    async with aclosing(Store(redis_url)) as store:
        for _ in range(200):
            task = asyncio.create_task(ask())
            await asyncio.sleep(0.002)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=1)
            assert done


@pytest.fixture
async def tls_port(redis_url: str, tmp_path: Path) -> AsyncIterator[int]:
    """TLS in front of the real server, which was built without it; the CA is in `ca.pem`."""
    async with tls_front(redis_url, tmp_path / "ca.pem") as port:
        yield port


async def test_tls_is_spoken_with_those_that_the_ca_file_vouches_for(
    tls_port: int, life: Life, tmp_path: Path
) -> None:
    """And with nobody else: block hashes tell who asked the same thing before."""
    url = f"rediss://127.0.0.1:{tls_port}/0"
    async with aclosing(Store(url, Access(ca_file=tmp_path / "ca.pem"))) as store:
        await store.append(Delta(life, 0, 1, (on_device(A, B),)))
        assert await load(store, life.worker_id) == (life, 1, dict.fromkeys((A, B), DEVICE_BIT))

    async with aclosing(Store(url)) as store:
        with pytest.raises(StoreRefused, match="certificate"):
            await store.load()


@pytest.mark.parametrize(
    ("url", "ca_file"),
    [
        pytest.param("redis://127.0.0.1:1", "ca.pem", id="a-ca-file-without-tls"),
        pytest.param("rediss://127.0.0.1:1", "missing.pem", id="no-ca-file"),
        pytest.param("http://user:secret@127.0.0.1:1", None, id="another-scheme"),
    ],
)
def test_settings_that_cannot_work_are_the_operators_fault(
    url: str, ca_file: str | None, tmp_path: Path
) -> None:
    """Told at the start, by place and without the password."""
    (tmp_path / "ca.pem").write_text("")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1") as refused:
        Store(url, Access(ca_file=tmp_path / ca_file if ca_file else None))

    assert "secret" not in str(refused.value)


async def test_a_wrong_password_is_told_without_it(life: Life, tmp_path: Path) -> None:
    port = free_port()
    command = [*redis_command(port, tmp_path), "--requirepass", "right"]
    server = LocalServer(command, port, tmp_path)
    try:
        server.start()
        async with aclosing(Store(f"redis://:wrong@{server.address}/0")) as store:
            with pytest.raises(StoreRefused) as refused:
                await store.append(Delta(life, 0, 1, ()))
        assert "wrong@" not in str(refused.value)
        assert store.place == server.address
    finally:
        server.kill()
