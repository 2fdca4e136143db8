"""Timelines are found by every id their client knows, by their tenant alone, for a while."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.ledger import Usage
from services.gateway.timelines import MAX_KEPT, Timeline, Timelines
from shared import farspan_pb2 as pb


def timeline(name: str, tenant: str = "a") -> Timeline:
    return Timeline(name, tenant, begin_unix_us=1)


def test_a_request_is_found_by_each_of_its_ids() -> None:
    """People hold the response's id as often as the x-request-id."""
    timelines = Timelines()
    mine = timeline("r1")
    timelines.add(mine, ("client-1", "chatcmpl-1"))

    assert [timelines.find(name, "a") for name in ("r1", "client-1", "chatcmpl-1")] == [mine] * 3
    assert timelines.find("r2", "a") is None


def test_another_tenant_s_request_is_as_unknown_as_none() -> None:
    """Times and workers tell of a neighbour's load; equal ids do not mix either."""
    timelines = Timelines()
    theirs, mine = timeline("same", "b"), timeline("same", "a")
    timelines.add(theirs, ("x",))
    timelines.add(mine)

    assert timelines.find("x", "a") is None
    assert timelines.find("same", "a") is mine
    assert timelines.find("same", "b") is theirs


def test_of_two_requests_with_one_id_the_later_is_found() -> None:
    """Also when the earlier one is forgotten."""
    timelines = Timelines(max_kept=2)
    timelines.add(timeline("r1"), ("again",))
    later = timeline("r2")
    timelines.add(later, ("again",))
    timelines.add(timeline("r3"))

    assert timelines.find("r1", "a") is None
    assert timelines.find("again", "a") is later


@settings(max_examples=50)
@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 6))
def test_no_more_are_kept_than_allowed(names: list[str], max_kept: int) -> None:
    """However often ids repeat: the last ones are found, and no other."""
    timelines = Timelines(max_kept)
    added = [timeline(name) for name in names]
    for each in added:
        timelines.add(each, ("all",))

    kept = added[-max_kept:]
    for name in "abc":
        of_name = [each for each in kept if each.id == name]
        assert timelines.find(name, "a") is (of_name[-1] if of_name else None)
    assert timelines.find("all", "a") is (kept[-1] if kept else None)


def test_the_last_512_are_kept() -> None:
    """A minute of a busy gateway."""
    timelines = Timelines()
    for number in range(MAX_KEPT + 1):
        timelines.add(timeline(str(number)))

    assert MAX_KEPT == 512
    assert timelines.find("0", "a") is None
    assert timelines.find("1", "a") is not None


def test_a_timeline_reads_in_the_order_of_its_stages() -> None:
    """Prefill tells its stages at once, decode at the end; they overlap."""
    mine = timeline("r1")
    pull = pb.Stage(name="handoff.pull", begin_unix_us=15, end_unix_us=30, num_tokens=64)
    chunk = pb.Stage(name="prefill.chunk", begin_unix_us=10, end_unix_us=20, num_tokens=64)
    mine.note_stages([pull], "d0", 1)
    mine.note_stages([chunk], "p0", 1)
    mine.attempts, mine.usage, mine.first_token_unix_us = 1, Usage(64, 0, 3, 1), 21

    assert mine.as_json() == {
        "id": "r1",
        "attempts": 1,
        "begin_unix_us": 1,
        "first_token_unix_us": 21,
        "end_unix_us": None,
        "usage": {
            "prompt_tokens": 64,
            "cached_tokens": 0,
            "completion_tokens": 3,
            "reasoning_tokens": 1,
        },
        "stages": [
            {
                "name": "prefill.chunk",
                "worker": "p0",
                "attempt": 1,
                "begin_unix_us": 10,
                "end_unix_us": 20,
                "num_tokens": 64,
            },
            {
                "name": "handoff.pull",
                "worker": "d0",
                "attempt": 1,
                "begin_unix_us": 15,
                "end_unix_us": 30,
                "num_tokens": 64,
            },
        ],
    }
