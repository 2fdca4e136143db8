"""The router counts with it, so it must follow the load and never divide by nothing."""

import pytest

from services.prefill.throughput import Throughput
from tests.services.router.fleets import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_measured_is_zero() -> None:
    assert Throughput().tokens_per_s == 0.0
    assert Throughput().step_s == 0.0


def test_only_the_last_minute_of_work_counts() -> None:
    """An hour of short prompts says little about the million tokens since."""
    throughput = Throughput()
    for _ in range(100):
        throughput.add(1000, 1.0)
    for _ in range(60):
        throughput.add(500, 1.0)

    assert throughput.tokens_per_s == pytest.approx(500)


def test_one_step_that_stood_still_changes_little() -> None:
    """A stopped machine made the router refuse long prompts for as long as nothing else came."""
    throughput = Throughput()
    for seconds in (1.0, 45.0, 1.1, 0.9):
        throughput.add(1000, seconds)

    assert throughput.tokens_per_s == pytest.approx(1000, rel=0.1)
    assert throughput.step_s == pytest.approx(1.1)


def test_a_measurement_grows_old(clock: Clock) -> None:
    """What was slow an hour ago may be fast now."""
    throughput = Throughput(clock)
    clock.now_s += 50
    assert throughput.age_s == 0.0
    throughput.add(1000, 1.0)
    clock.now_s += 70

    assert throughput.age_s == pytest.approx(70)


def test_a_step_takes_what_those_of_the_last_minute_took() -> None:
    """Whoever comes while one runs waits for about so long, however little it computes."""
    throughput = Throughput()
    for _ in range(100):
        throughput.add(64, 0.1)
    for _ in range(300):
        throughput.add(1000, 0.25)

    assert throughput.step_s == pytest.approx(0.25)


def test_many_short_steps_are_measured_by_the_latest() -> None:
    """A minute of them would be sorted for each heartbeat."""
    throughput = Throughput()
    for _ in range(600):
        throughput.add(10, 0.001)
    for _ in range(512):
        throughput.add(10, 0.002)

    assert throughput.tokens_per_s == pytest.approx(5000)
    assert throughput.step_s == pytest.approx(0.002)


def test_a_step_longer_than_the_window_is_all_there_is() -> None:
    throughput = Throughput()
    throughput.add(10, 1.0)
    throughput.add(900, 90.0)

    assert throughput.tokens_per_s == pytest.approx(10)
