"""A gateway that is gone is known by its silence, unless it was we who could not hear."""

import pytest

from services.router.gateways import Gateways
from tests.services.router.fleets import Clock


@pytest.fixture
def gateways(clock: Clock) -> Gateways:
    return Gateways(clock, silence_s=10.0)


def test_a_gateway_that_speaks_is_there(gateways: Gateways, clock: Clock) -> None:
    for _ in range(30):
        clock.now_s += 1.0
        gateways.hear("g")

    assert gateways.gone(["g"]) == set()


def test_a_silent_gateway_is_gone_and_can_come_back(gateways: Gateways, clock: Clock) -> None:
    gateways.hear("g")
    clock.now_s += 10.5
    gateways.hear("other")

    assert gateways.gone(["g", "other"]) == {"g"}

    gateways.hear("g")
    assert gateways.gone(["g", "other"]) == set()


def test_one_that_was_never_heard_has_as_long_as_we_have_listened(
    gateways: Gateways, clock: Clock
) -> None:
    """A router that starts learns promises of gateways that died before."""
    clock.now_s += 9.5
    assert gateways.gone(["g"]) == set()

    clock.now_s += 1.0
    assert gateways.gone(["g"]) == {"g"}


def test_silence_while_we_could_not_hear_is_excused(gateways: Gateways, clock: Clock) -> None:
    gateways.hear("g")
    clock.now_s += 60.0
    gateways.excuse_silence()

    clock.now_s += 9.5
    assert gateways.gone(["g"]) == set()

    clock.now_s += 1.0
    assert gateways.gone(["g"]) == {"g"}


def test_a_promise_to_nobody_in_particular_ends_by_its_deadline_only(
    gateways: Gateways, clock: Clock
) -> None:
    clock.now_s += 100.0

    assert gateways.gone([""]) == set()
