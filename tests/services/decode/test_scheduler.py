"""Three budgets gate admission; what runs is never preempted; everything ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.decode.scheduler import Capacity, DecodeScheduler
from shared.engine.kv.residency import ResidencyMode, make_policy
from shared.errors import BadRequest, TooLong


def make_scheduler(
    *,
    host_pages: int = 1000,
    device_pages: int = 100,
    index_pages: int = 1000,
    max_sequences: int = 64,
    max_overtakes: int = 4,
) -> DecodeScheduler:
    """Long sequences cost four hot pages and two tail pages; three drafts a step."""
    policy = make_policy(
        ResidencyMode.MIXED, hot_rows=256, union_rows=256, num_device_pages=device_pages
    )
    return DecodeScheduler(
        Capacity(host_pages, device_pages, index_pages, max_sequences),
        policy,
        num_draft_tokens=3,
        max_overtakes=max_overtakes,
    )


def always(request_id: str) -> bool:
    """The blocks are there."""
    return True


@pytest.mark.parametrize(
    ("budgets", "num_admitted"),
    [
        pytest.param({"host_pages": 25}, 2, id="host-pages"),
        pytest.param({"device_pages": 20}, 3, id="device-pages"),
        pytest.param({"index_pages": 19}, 1, id="index-pages"),
        pytest.param({"max_sequences": 4}, 4, id="sequences"),
    ],
)
def test_each_budget_gates_admission(budgets: dict[str, int], num_admitted: int) -> None:
    """Ten pages a sequence, six of them on the device: the scarcest budget decides."""
    scheduler = make_scheduler(**budgets)
    for place in range(8):
        scheduler.enqueue(str(place), 600, 37)

    assert len(scheduler.admit(always)) == num_admitted
    assert scheduler.num_waiting == 8 - num_admitted


def test_room_for_the_whole_answer_and_its_drafts_is_reserved_at_once() -> None:
    """So no sequence is ever preempted for room."""
    scheduler = make_scheduler()
    scheduler.enqueue("a", 100, 89)
    scheduler.admit(always)
    assert scheduler.free.host_pages == 1000 - 3

    scheduler.enqueue("b", 100, 90)
    scheduler.admit(always)
    assert scheduler.free.host_pages == 1000 - 3 - 4


def test_a_sequence_runs_once_its_kv_is_here() -> None:
    """An import under way holds its reservation, not a place in the batch."""
    scheduler = make_scheduler()
    scheduler.enqueue("a", 100, 10)
    scheduler.admit(always)
    assert (scheduler.batch(), scheduler.unimported_tokens) == ([], 100)

    scheduler.start("a")

    assert [sequence.request_id for sequence in scheduler.batch()] == ["a"]
    assert scheduler.unimported_tokens == 0


def test_an_answer_ends_at_its_greatest_length() -> None:
    """Several tokens may be accepted in one step."""
    scheduler = make_scheduler()
    scheduler.enqueue("a", 100, 5)
    scheduler.admit(always)
    scheduler.start("a")

    assert [scheduler.advance("a", n) for n in (1, 3, 1)] == [False, False, True]


def test_a_sequence_leaves_in_every_state() -> None:
    """Waiting, importing, running: the budgets return to base."""
    scheduler = make_scheduler(max_sequences=2)
    before = scheduler.free
    for request_id in ("running", "importing", "waiting"):
        scheduler.enqueue(request_id, 100, 10)
    scheduler.admit(always)
    scheduler.start("running")

    for request_id in ("waiting", "importing", "running"):
        assert scheduler.release(request_id)
        assert not scheduler.release(request_id)

    assert scheduler.free == before
    assert scheduler.batch() == []
    assert scheduler.unimported_tokens == 0


def test_the_published_limit_is_what_enqueue_accepts() -> None:
    """The gateway refuses by it; one token more could never run."""
    scheduler = make_scheduler(host_pages=10)
    limit = scheduler.max_sequence_tokens

    scheduler.enqueue("a", limit - 1, 1)
    with pytest.raises(TooLong):
        scheduler.enqueue("b", limit, 1)
    with pytest.raises(BadRequest):
        scheduler.enqueue("a", 1, 1)


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 5000), st.integers(1, 1000)), min_size=1, max_size=30
    ),
    data=st.data(),
)
def test_all_run_to_their_end_within_the_budgets(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    """However arrivals, imports, steps and cancels fall; and no length exceeds its reservation."""
    scheduler = make_scheduler(host_pages=100, device_pages=20, index_pages=100, max_sequences=5)
    base = scheduler.free
    to_come = {str(i): lengths_of for i, lengths_of in enumerate(lengths)}
    ended, importing = set(), []

    for _ in range(20 * len(lengths)):
        if to_come:
            request_id = next(iter(to_come))
            scheduler.enqueue(request_id, *to_come.pop(request_id))
        importing += scheduler.admit(always)
        free = scheduler.free
        assert min(free.host_pages, free.device_pages, free.index_pages, free.max_sequences) >= 0
        if importing and data.draw(st.booleans()):
            scheduler.start(importing.pop())
        for sequence in scheduler.batch():
            left = sequence.end - sequence.num_tokens
            is_done = scheduler.advance(sequence.request_id, min(left, 300))
            if is_done or data.draw(st.integers(0, 19)) == 0:
                assert scheduler.release(sequence.request_id)
                ended.add(sequence.request_id)
    for request_id in importing:
        scheduler.start(request_id)

    assert len(ended) + len(scheduler.batch()) + scheduler.num_waiting == len(lengths)
    for request_id in map(str, range(len(lengths))):
        scheduler.release(request_id)
    assert scheduler.free == base


@pytest.mark.parametrize("mode", list(ResidencyMode))
@pytest.mark.parametrize("num_pages", [1, 2, 3, 6, 7, 20])
def test_what_a_sequence_takes_of_the_device_can_be_told_by_two_numbers(
    mode: ResidencyMode, num_pages: int
) -> None:
    """The router counts with them before the request comes here."""
    policy = make_policy(mode, hot_rows=256, union_rows=256, num_device_pages=20)
    scheduler = DecodeScheduler(Capacity(1000, 20, 1000, 64), policy, num_draft_tokens=0)
    whole, leased = scheduler.max_whole_pages, scheduler.leased_device_pages

    told = num_pages if num_pages <= whole else leased

    assert told == policy.device_pages(num_pages * 64)
    scheduler.enqueue("a", num_pages * 64 - 1, 1)
    scheduler.admit(always)
    assert scheduler.free.device_pages == 20 - told
