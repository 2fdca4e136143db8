"""First come first served, no budget exceeded, and nobody waits for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.admission import AdmissionQueue
from shared.errors import BadRequest, TooLong


def always(request_id: str) -> bool:
    """There is always room beyond the budgets."""
    return True


def test_what_does_not_fit_now_waits() -> None:
    """A full pool is no failure (sglang#23704: the third request failed, and all after it)."""
    queue = AdmissionQueue({"pages": 2}, max_overtakes=4)
    for name in "abc":
        queue.enqueue(name, {"pages": 1})

    assert queue.admit(always) == ["a", "b"]
    assert queue.admit(always) == []
    queue.release("a")
    assert queue.admit(always) == ["c"]


def test_every_budget_counts() -> None:
    """Room in one pool does not stand in for another."""
    queue = AdmissionQueue({"pages": 10, "rows": 1}, max_overtakes=4)
    queue.enqueue("a", {"pages": 1, "rows": 1})
    queue.enqueue("b", {"pages": 1, "rows": 1})

    assert queue.admit(always) == ["a"]
    assert queue.free == {"pages": 9, "rows": 0}


def test_what_could_never_fit_is_refused_by_name() -> None:
    """Waiting would be for ever."""
    queue = AdmissionQueue({"pages": 2}, max_overtakes=4)

    with pytest.raises(TooLong, match="needs 3 pages, there are 2"):
        queue.enqueue("a", {"pages": 3})
    assert queue.num_waiting == 0


def test_a_request_is_taken_once() -> None:
    """A second one with its id would free the first one's room."""
    queue = AdmissionQueue({"pages": 2}, max_overtakes=4)
    queue.enqueue("a", {"pages": 1})

    with pytest.raises(BadRequest):
        queue.enqueue("a", {"pages": 1})
    queue.admit(always)
    with pytest.raises(BadRequest):
        queue.enqueue("a", {"pages": 1})


def test_small_ones_pass_a_big_one_only_so_often() -> None:
    """Its room would never come together while they keep coming."""
    queue = AdmissionQueue({"pages": 4}, max_overtakes=2)
    queue.enqueue("running", {"pages": 1})
    queue.admit(always)
    queue.enqueue("big", {"pages": 4})
    for name in "abc":
        queue.enqueue(name, {"pages": 1})

    assert queue.admit(always) == ["a", "b"]
    for name in ("running", "a"):
        queue.release(name)
    assert queue.admit(always) == []
    queue.release("b")
    assert queue.admit(always) == ["big"]


def test_a_refused_reservation_takes_nothing() -> None:
    """The budgets allow it, the real pool does not yet."""
    queue = AdmissionQueue({"pages": 2}, max_overtakes=4)
    queue.enqueue("a", {"pages": 2})
    queue.enqueue("b", {"pages": 1})

    assert queue.admit(lambda request_id: request_id == "b") == ["b"]
    assert queue.free == {"pages": 1}


def test_what_is_held_is_neither_overtaken_nor_in_the_way() -> None:
    """It waits for something else than room: others need not wait for it."""
    queue = AdmissionQueue({"pages": 9}, max_overtakes=1)
    for request_id in "abcd":
        queue.enqueue(request_id, {"pages": 1})

    assert queue.admit(always, lambda request_id: request_id == "a") == ["b", "c", "d"]
    assert queue.admit(always) == ["a"]


def test_what_has_no_room_is_not_asked_whether_it_is_held() -> None:
    """The answer costs something, and a long queue would ask for it at every step."""
    queue = AdmissionQueue({"pages": 1}, max_overtakes=9)
    queue.enqueue("a", {"pages": 1})
    queue.enqueue("b", {"pages": 1})
    asked: list[str] = []

    queue.admit(always, lambda request_id: bool(asked.append(request_id)))

    assert asked == ["a"]


def test_release_is_told_whether_there_was_something_to_release() -> None:
    """Cancel and finish may cross; the second must not free twice."""
    queue = AdmissionQueue({"pages": 2}, max_overtakes=4)
    queue.enqueue("a", {"pages": 2})
    queue.admit(always)

    assert queue.release("a")
    assert not queue.release("a")
    assert queue.free == {"pages": 2}


@given(
    demands=st.lists(st.integers(1, 10), min_size=1, max_size=40),
    max_overtakes=st.integers(0, 5),
    data=st.data(),
)
def test_nobody_is_overtaken_more_than_the_bound(
    demands: list[int], max_overtakes: int, data: st.DataObject
) -> None:
    """And everybody starts, though later ones keep arriving; the budget is respected throughout."""
    queue = AdmissionQueue({"pages": 10}, max_overtakes=max_overtakes)
    overtaken = dict.fromkeys(range(len(demands)), 0)
    running: list[int] = []
    started: set[int] = set()

    for arrival in [*range(len(demands)), *[None] * 2 * len(demands)]:
        if arrival is not None:
            queue.enqueue(str(arrival), {"pages": demands[arrival]})
        if running and (arrival is None or data.draw(st.booleans())):
            done = running.pop(data.draw(st.integers(0, len(running) - 1)))
            queue.release(str(done))
        for admitted in map(int, queue.admit(always)):
            for earlier in range(admitted):
                overtaken[earlier] += earlier not in started
            running.append(admitted)
            started.add(admitted)
        assert sum(demands[r] for r in running) == 10 - queue.free["pages"] <= 10

    assert max(overtaken.values()) <= max_overtakes
    assert started == set(range(len(demands)))
