import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.door.keys import Caller, Limits
from services.gateway.door.limits import Bounds, Bucket, Turnstile, Visit
from services.gateway.failures import InvalidRequest


def turnstile(max_in_flight: int = 100, max_queued: int = 100) -> Turnstile:
    return Turnstile(Bounds(max_in_flight, max_queued))


def refused(error: pytest.ExceptionInfo[InvalidRequest]) -> int:
    """The seconds of Retry-After."""
    assert error.value.status == 429
    return int(error.value.headers["retry-after"])


def test_no_more_than_a_key_may_have_are_inside() -> None:
    doors, alice, bob = turnstile(), Caller("alice", limits=Limits(max_in_flight=1)), Caller("bob")
    first = doors.enter(alice, 0.0)

    with pytest.raises(InvalidRequest) as error:
        doors.enter(alice, 0.0)
    assert refused(error) == 1
    doors.enter(bob, 0.0)
    doors.leave(first)
    doors.enter(alice, 0.0)

    assert doors.num_in_flight == 2


def test_no_more_than_the_gateway_holds_are_inside() -> None:
    doors = turnstile(max_in_flight=2)
    inside = [doors.enter(Caller(name), 0.0) for name in "ab"]

    with pytest.raises(InvalidRequest) as error:
        doors.enter(Caller("c"), 0.0)
    assert refused(error) == 1
    doors.leave(inside[0])
    doors.enter(Caller("c"), 0.0)


def test_no_more_than_the_gateway_lets_queue_wait_for_a_first_token() -> None:
    doors = turnstile(max_queued=1)
    first, second = (doors.enter(Caller(name), 0.0) for name in "ab")
    first.enter_queue()
    first.enter_queue()

    with pytest.raises(InvalidRequest) as error:
        second.enter_queue()
    refused(error)
    first.leave_queue()
    first.leave_queue()
    second.enter_queue()
    doors.leave(second)

    assert doors.num_queued == 0, "who leaves waits no longer"


def test_a_refused_request_leaves_nothing_behind() -> None:
    doors = turnstile()
    caller = Caller("alice", limits=Limits(requests_per_minute=1))
    doors.leave(doors.enter(caller, 0.0))
    with pytest.raises(InvalidRequest) as error:
        doors.enter(caller, 1.0)

    assert refused(error) == 59
    assert doors.num_in_flight == 0
    assert error.value.headers["x-ratelimit-limit-requests"] == "1"
    assert error.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert error.value.headers["x-ratelimit-reset-requests"] == "59.000s"


def test_a_prompt_beyond_a_minutes_tokens_goes_once_and_is_paid_for() -> None:
    doors = turnstile()
    visit = doors.enter(Caller("alice", limits=Limits(prompt_tokens_per_minute=100)), 0.0)
    visit.note_prompt(250, 0.0)

    with pytest.raises(InvalidRequest) as error:
        visit.note_prompt(1, 0.0)
    assert refused(error) == 91, "150 are owed, and one is asked for"
    visit.note_prompt(1, 91.0)
    assert visit.headers(91.0)["x-ratelimit-remaining-tokens"] == "0"


def test_a_key_claims_no_more_priority_than_it_has() -> None:
    visit: Visit = turnstile().enter(Caller("a", limits=Limits(max_priority=0)), 0.0)
    visit.check_priority(-1)
    visit.check_priority(0)

    with pytest.raises(InvalidRequest) as error:
        visit.check_priority(1)
    assert error.value.status == 403
    turnstile().enter(Caller(), 0.0).check_priority(2)


def test_a_changed_limit_holds_at_once() -> None:
    doors = turnstile()
    doors.enter(Caller("a", limits=Limits(requests_per_minute=1)), 0.0)
    doors.enter(Caller("a", limits=Limits(requests_per_minute=2)), 0.0)
    doors.enter(Caller("a", limits=Limits(requests_per_minute=2)), 0.0)
    with pytest.raises(InvalidRequest):
        doors.enter(Caller("a", limits=Limits(requests_per_minute=2)), 0.0)
    doors.enter(Caller("a"), 0.0)


asks = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400)), min_size=1, max_size=60)


@given(st.integers(1, 200), asks)
def test_no_stretch_of_time_sees_more_than_its_allowance(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """From any taking to any later one: a full bucket, what flowed in, and one debt at most."""
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for pause_s, count in steps:
        now_s += pause_s
        if bucket.wait_s(count, now_s) == 0:
            bucket.take(count, now_s)
            taken.append((now_s, count))

    for first in range(len(taken)):
        total = 0
        for at_s, count in taken[first:]:
            flowed = (at_s - taken[first][0]) * per_minute / 60
            assert total + min(count, per_minute) <= per_minute + flowed + 1e-3
            total += count


@given(st.integers(1, 200), asks)
def test_who_waits_as_long_as_he_was_told_is_let_in(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    for pause_s, count in steps:
        now_s += pause_s
        now_s += math.ceil(bucket.wait_s(count, now_s))
        assert bucket.wait_s(count, now_s) == 0
        bucket.take(count, now_s)
