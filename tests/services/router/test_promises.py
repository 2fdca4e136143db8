import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.fleet import Heard
from services.router.policy import Decision
from services.router.promises import Promises
from services.router.view import Hit, Promised, Worker, WorkerKey
from shared import farspan_pb2 as pb
from tests.services.router.fleets import Clock, chain, decode, prefill, request

DECISION = Decision(
    pb.Placement(
        prefill=pb.WorkerRef(worker_id="p0", epoch=1), decode=pb.WorkerRef(worker_id="d0", epoch=1)
    ),
    prefill_tokens=700,
    prefill_s=5.0,
    decode_pages=20,
)


@pytest.fixture
def promises(clock: Clock) -> Promises:
    return Promises(clock)


def promised(promises: Promises, worker: Worker, heard_s: float) -> Promised:
    (applied,) = promises.applied([Heard(worker.heartbeat, heard_s)])
    return applied.promised


def test_a_promise_counts_at_once_and_until_the_request_ends(
    promises: Promises, clock: Clock
) -> None:
    """Nothing leaks, whatever way a request ends (C1)."""
    promises.make(request(request_id="a"), DECISION, 60)
    promises.make(request(request_id="b"), DECISION, 60)

    expected = Promised(num_requests=2, num_pages=40)
    assert promised(promises, decode("d0"), clock()) == expected
    expected = Promised(prefill_tokens=1400, num_new=2)
    assert promised(promises, prefill("p0"), clock()) == expected

    promises.end("a")
    promises.end("a")
    promises.end("never heard of")
    assert promised(promises, decode("d0"), clock()) == Promised(num_requests=1, num_pages=20)


def test_a_request_that_ends_while_it_is_placed_is_promised_nothing(
    promises: Promises, clock: Clock
) -> None:
    """The client left during the prefix query: nobody would end the promise before its deadline."""
    promises.end("a")
    promises.make(request(request_id="a"), DECISION, 60)

    assert promised(promises, decode("d0"), clock()) == Promised()


def test_500_aborts_leave_nothing(promises: Promises, clock: Clock) -> None:
    """A count that only grows would turn all traffic away from a healthy worker (C1)."""
    for i in range(500):
        promises.make(request(request_id=str(i)), DECISION, 60)
        promises.end(str(i))

    assert len(promises) == 0
    assert promised(promises, decode("d0"), clock()) == Promised()


def test_a_promise_ends_at_the_requests_deadline_at_the_latest(
    promises: Promises, clock: Clock
) -> None:
    """A gateway that died never says that its requests have ended."""
    promises.make(request(), DECISION, 60)

    clock.now_s += 60

    assert len(promises) == 0
    assert promised(promises, decode("d0"), clock()) == Promised()


def test_prefill_work_moves_from_the_promise_into_the_heartbeat(
    promises: Promises, clock: Clock
) -> None:
    """A heartbeat sent well after the submit counts the request; both would count it twice."""
    promises.make(request(), DECISION, 60)
    made_s = clock()

    assert promised(promises, prefill("p0"), made_s + 0.1).prefill_tokens == 700
    assert promised(promises, prefill("p0"), made_s + 0.5) == Promised()


def test_a_promise_belongs_to_one_life(promises: Promises, clock: Clock) -> None:
    """A restarted worker starts empty."""
    promises.make(request(), DECISION, 60)

    assert promised(promises, decode("d0", epoch=2), clock()) == Promised()


def test_a_request_placed_again_is_promised_once(promises: Promises, clock: Clock) -> None:
    """The gateway keeps the id when it resumes elsewhere."""
    moved = Decision(
        pb.Placement(
            prefill=pb.WorkerRef(worker_id="p1", epoch=1),
            decode=pb.WorkerRef(worker_id="d0", epoch=1),
        ),
        prefill_tokens=700,
        prefill_s=5.0,
        decode_pages=21,
    )
    promises.make(request(), DECISION, 60)
    promises.make(request(), moved, 60)

    assert promised(promises, prefill("p0"), clock()) == Promised()
    assert promised(promises, decode("d0"), clock()) == Promised(num_requests=1, num_pages=21)


def test_a_prefix_on_the_way_is_a_hit_until_the_index_must_know(
    promises: Promises, clock: Clock
) -> None:
    """Later the worker may have evicted it, and the index is the one to ask (C8)."""
    promises.make(request(640, hashes=chain(8) + chain(2, first=99)), DECISION, 600)

    assert promises.prefixes_on_the_way(chain(15)) == {
        WorkerKey("p0", 1): Hit(8, pb.TIER_DEVICE, True)
    }
    assert promises.prefixes_on_the_way(chain(3)) == {
        WorkerKey("p0", 1): Hit(3, pb.TIER_DEVICE, True)
    }
    assert promises.prefixes_on_the_way(chain(5, first=50)) == {}

    clock.now_s += 10
    assert promises.prefixes_on_the_way(chain(15)) == {}


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
@settings(deadline=None)
def test_the_longest_common_prefix_is_found(common: int, left: int, right: int) -> None:
    """Whatever the lengths of the prompts."""
    promises = Promises(Clock())
    promises.make(request(hashes=chain(common) + chain(left, first=1000)), DECISION, 60)

    hits = promises.prefixes_on_the_way(chain(common) + chain(right, first=2000))

    assert hits == ({WorkerKey("p0", 1): Hit(common, pb.TIER_DEVICE, True)} if common else {})
