import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace

import pytest

from services.kv_index.config import KvIndexConfig
from services.kv_index.events import End, Life
from services.kv_index.holdings import Delta
from services.kv_index.store import Store
from services.kv_index.watch import Watch
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash
from shared.bus import Bus
from tests.services.kv_index.fake_worker import FakeWorker
from tests.services.kv_index.served import (
    eventually,
    figures,
    hits,
    next_life,
    serving,
    until,
)

LIFE = Life("w0", 7)


def test_a_worker_that_works_and_never_publishes_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else the router is blind to it in silence (B12); the grace is for the first prompt."""
    watch = Watch(grace_s=60)
    watch.note(LIFE, is_working=False, is_known=False, now_s=0)
    for now_s in (100, 130, 159):
        watch.note(LIFE, is_working=True, is_known=False, now_s=now_s)
    assert watch.counts["mute_workers"] == 0

    for now_s in (160, 161):
        watch.note(LIFE, is_working=False, is_known=False, now_s=now_s)
    assert watch.counts["mute_workers"] == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "w0" in caplog.text

    watch.note(LIFE, is_working=True, is_known=True, now_s=162)
    assert watch.counts["mute_workers"] == 0


def test_an_idle_worker_and_one_that_publishes_are_not_reported() -> None:
    watch = Watch(grace_s=60)
    for now_s in (0, 100, 200):
        watch.note(LIFE, is_working=False, is_known=False, now_s=now_s)
        watch.note(Life("w1", 1), is_working=True, is_known=True, now_s=now_s)

    assert watch.counts["mute_workers"] == 0


def test_a_life_that_is_over_is_not_mute() -> None:
    watch = Watch(grace_s=0)
    watch.note(LIFE, is_working=True, is_known=False, now_s=1)
    assert watch.counts["mute_workers"] == 1

    watch.keep([], now_s=1)
    assert watch.counts["mute_workers"] == 0


def test_a_restart_ends_the_silence_of_the_life_before() -> None:
    """Else the alarm rings until kv_index starts again, whatever the worker publishes."""
    watch = Watch(grace_s=10)
    for now_s in (0, 10):
        watch.note(LIFE, is_working=True, is_known=False, now_s=now_s)
    assert watch.counts["mute_workers"] == 1

    reborn = Life("w0", 8)
    watch.note(reborn, is_working=True, is_known=False, now_s=11)
    watch.keep([reborn], now_s=11)
    assert watch.counts["mute_workers"] == 0, "its own grace begins"
    watch.note(reborn, is_working=True, is_known=False, now_s=21)
    assert watch.counts["mute_workers"] == 1


def test_a_digest_that_contradicts_its_own_snapshot_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = Watch(grace_s=60)
    for _ in range(3):
        watch.note_doubted({LIFE})

    assert watch.counts["doubted_workers"] == 1
    assert len(caplog.records) == 1


def test_a_ready_worker_in_a_past_life_is_told_once_after_the_grace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is late of a past life comes within seconds; a clock that went back stays back."""
    watch = Watch(grace_s=60)
    for now_s in (100, 130, 159):
        watch.note_shadowed(LIFE, 1_800_000_000 * 10**9, now_s)
    assert (watch.counts["shadowed_workers"], caplog.records) == (0, [])

    for now_s in (160, 161):
        watch.note_shadowed(LIFE, 1_800_000_000 * 10**9, now_s)
    assert watch.counts["shadowed_workers"] == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "w0" in caplog.text and "2027-01-15T08:00:00" in caplog.text

    watch.keep([], now_s=162)
    assert watch.counts["shadowed_workers"] == 1
    watch.keep([LIFE], now_s=163)
    assert watch.counts["shadowed_workers"] == 0, "it is followed"


def test_a_past_life_that_is_heard_now_and_then_is_late() -> None:
    watch = Watch(grace_s=60)
    for now_s in (100, 161, 222):
        watch.keep([], now_s)
        watch.note_shadowed(LIFE, 8, now_s)

    assert watch.counts["shadowed_workers"] == 0


def test_a_life_that_begins_in_the_future_is_told_once_until_it_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = Watch(grace_s=60)
    for now_s in (1, 2, 3):
        watch.note_ahead(LIFE, now_s)
        watch.keep([], now_s)
    assert watch.counts["ahead_workers"] == 1
    assert len(caplog.records) == 1 and "w0" in caplog.text

    watch.keep([], now_s=64)
    assert watch.counts["ahead_workers"] == 0


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
