import math

import pytest

from services.router.fleet import Fleet
from shared import farspan_pb2 as pb
from shared.errors import BadRequest
from tests.services.router.fleets import Clock, heartbeat, load


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    return Fleet(clock, silence_s=3.0)


def names(fleet: Fleet) -> list[tuple[str, int]]:
    return [(key.worker_id, key.epoch) for key in (heard.key for heard in fleet.live())]


def test_workers_join_at_any_time_and_leave_after_silence(fleet: Fleet, clock: Clock) -> None:
    """The router may be first and workers may come late (C10)."""
    assert names(fleet) == []

    fleet.observe(heartbeat("p1", pb.ROLE_PREFILL))
    clock.now_s += 2
    fleet.observe(heartbeat("d0", pb.ROLE_DECODE))
    assert names(fleet) == [("d0", 1), ("p1", 1)]

    clock.now_s += 1.5
    assert names(fleet) == [("d0", 1)]

    fleet.observe(heartbeat("p1", pb.ROLE_PREFILL))
    assert names(fleet) == [("d0", 1), ("p1", 1)], "a worker that speaks again is back"


def test_the_last_heartbeat_counts(fleet: Fleet) -> None:
    """Load is never reset or averaged (C2)."""
    fleet.observe(heartbeat("p0", pb.ROLE_PREFILL, load=load(num_waiting=9)))
    fleet.observe(heartbeat("p0", pb.ROLE_PREFILL, load=load(num_waiting=2)))

    (heard,) = fleet.live()
    assert heard.heartbeat.load.num_waiting == 2


def test_a_new_epoch_replaces_the_old_which_cannot_come_back(fleet: Fleet) -> None:
    """A late heartbeat of the past life would send requests to nobody."""
    fleet.observe(heartbeat("p0", pb.ROLE_PREFILL, epoch=5))
    fleet.observe(heartbeat("p0", pb.ROLE_PREFILL, epoch=6))
    fleet.observe(heartbeat("p0", pb.ROLE_PREFILL, epoch=5))

    assert names(fleet) == [("p0", 6)]


def test_a_worker_that_stops_is_gone_at_once(fleet: Fleet) -> None:
    """It says so; the next placement must not wait three seconds to believe it."""
    fleet.observe(heartbeat("p0", pb.ROLE_PREFILL))
    fleet.observe(heartbeat("p0", pb.ROLE_PREFILL, state=pb.SERVICE_STATE_STOPPED))

    assert names(fleet) == []


def test_silence_while_we_could_not_hear_is_excused(fleet: Fleet, clock: Clock) -> None:
    """After a restart of NATS the fleet is as before, not empty (D8)."""
    fleet.observe(heartbeat("p0", pb.ROLE_PREFILL))
    for _ in range(20):
        clock.now_s += 0.5
        fleet.excuse_silence()
    assert names(fleet) == [("p0", 1)]

    clock.now_s += 3.5
    assert names(fleet) == []


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(heartbeat("", pb.ROLE_PREFILL), id="no-id"),
        pytest.param(heartbeat("p0", pb.ROLE_PREFILL, epoch=0), id="no-epoch"),
        pytest.param(heartbeat("p0", pb.ROLE_UNSPECIFIED), id="no-role"),
        pytest.param(
            heartbeat("p0", pb.ROLE_DECODE, state=pb.SERVICE_STATE_UNSPECIFIED), id="no-state"
        ),
    ],
)
def test_an_unclear_heartbeat_is_refused(fleet: Fleet, broken: pb.Heartbeat) -> None:
    """proto3 reads what is missing as zero; here it stops."""
    with pytest.raises(BadRequest):
        fleet.observe(broken)

    assert names(fleet) == []


@pytest.mark.parametrize("measured", [-1e6, math.inf, math.nan])
@pytest.mark.parametrize("name", ["tokens_per_s", "eviction_age_s", "step_s"])
def test_a_figure_that_no_worker_can_measure_is_refused(
    fleet: Fleet, name: str, measured: float
) -> None:
    """One such worker would be chosen for everything, or make every decision fail."""
    broken = heartbeat("p0", pb.ROLE_PREFILL)
    setattr(broken.load, name, measured)

    with pytest.raises(BadRequest, match="p0 measured"):
        fleet.observe(broken)

    assert names(fleet) == []
