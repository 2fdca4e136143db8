import logging

import pytest

from services.kv_index.events import Life
from services.kv_index.watch import Watch

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
