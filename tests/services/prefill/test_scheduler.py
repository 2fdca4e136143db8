"""The budget is respected, every token is computed once, and no prompt starves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prefill.scheduler import (
    AGE_EVERY,
    PlannedChunk,
    PrefillScheduler,
    Prompt,
    max_steps,
    plan_chunks,
)
from shared.errors import BadRequest, ConfigError, TooLong


def make_scheduler(chunk_tokens: int = 512, num_blocks: int = 100_000) -> PrefillScheduler:
    return PrefillScheduler(num_blocks=num_blocks, block_tokens=64, chunk_tokens=chunk_tokens)


def cold(request_id: str) -> int:
    """Blocks are there and nothing is cached."""
    return 0


def submit(scheduler: PrefillScheduler, request_id: str, num_tokens: int, hit: int = 0) -> None:
    scheduler.enqueue(request_id, num_tokens)
    assert scheduler.admit(lambda _: hit) == [request_id]


def steps_until(scheduler: PrefillScheduler, request_id: str) -> int:
    """Steps until the prompt is complete."""
    for num_steps in range(1, 100_000):
        if request_id in scheduler.computed(scheduler.next_step()):
            return num_steps
    raise AssertionError("never")


def test_a_prompt_is_computed_chunk_by_chunk_behind_its_hit() -> None:
    """Cached tokens are not computed again; inner chunks end on block boundaries."""
    scheduler = make_scheduler(chunk_tokens=192)
    submit(scheduler, "a", 600, hit=128)

    chunks: list[PlannedChunk] = []
    while step := scheduler.next_step():
        chunks += step
        scheduler.computed(step)

    assert [(c.first, c.end) for c in chunks] == [(128, 320), (320, 512), (512, 600)]


def test_several_prompts_share_a_step() -> None:
    """What a short prompt leaves of the budget is used in whole blocks."""
    prompts = [Prompt("a", 100, 0), Prompt("b", 1000, 0), Prompt("c", 64, 0)]

    assert plan_chunks(prompts, 512) == [
        PlannedChunk("a", 0, 100),
        PlannedChunk("b", 0, 384),
    ]


def test_a_short_turn_does_not_wait_for_a_million_tokens() -> None:
    """2,048 tokens beside 1,048,576: at most one step more than alone."""
    scheduler = make_scheduler(chunk_tokens=2048)
    submit(scheduler, "long", 1 << 20)
    for phase in range(AGE_EVERY):
        submit(scheduler, f"turn{phase}", 2048)
        assert steps_until(scheduler, f"turn{phase}") <= 2
        scheduler.computed(scheduler.next_step())


def test_a_million_tokens_do_not_starve_behind_short_turns() -> None:
    """One new turn with every step takes all but the aged steps."""
    scheduler = make_scheduler(chunk_tokens=16384)
    submit(scheduler, "long", 1 << 20)
    assert max_steps([1 << 20], 16384) == 4 * 64

    complete: list[str] = []
    for num_steps in range(4 * 64):
        submit(scheduler, f"turn{num_steps}", 16384)
        complete += scheduler.computed(scheduler.next_step())

    assert "long" in complete


@given(
    chunk_blocks=st.integers(1, 8),
    ahead=st.lists(st.integers(1, 3000), max_size=6),
    own=st.integers(1, 3000),
    later=st.lists(st.lists(st.integers(1, 700), max_size=3), max_size=30),
    offset=st.integers(0, AGE_EVERY),
)
def test_no_prompt_starves(
    chunk_blocks: int, ahead: list[int], own: int, later: list[list[int]], offset: int
) -> None:
    """The bound depends on what started before, never on what arrives later."""
    scheduler = make_scheduler(chunk_blocks * 64)
    for _ in range(offset):
        scheduler.computed(scheduler.next_step())
    for place, num_tokens in enumerate(ahead):
        submit(scheduler, f"ahead{place}", num_tokens)
    submit(scheduler, "own", own)
    bound = max_steps([*ahead, own], chunk_blocks * 64)

    for num_steps in range(bound):
        for place, num_tokens in enumerate(later[num_steps % len(later)] if later else []):
            submit(scheduler, f"later{num_steps}.{place}", num_tokens)
        if "own" in scheduler.computed(scheduler.next_step()):
            return

    raise AssertionError(f"not complete after {bound} steps")


@given(
    chunk_blocks=st.integers(1, 20),
    prompts=st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 30)), min_size=1, max_size=10),
)
def test_every_token_is_computed_once_within_the_budget(
    chunk_blocks: int, prompts: list[tuple[int, int]]
) -> None:
    """Chunks of a prompt follow one another from its hit to its end."""
    scheduler = make_scheduler(chunk_blocks * 64)
    hits = {str(i): min(hit, (n - 1) // 64) * 64 for i, (n, hit) in enumerate(prompts)}
    for place, (num_tokens, _) in enumerate(prompts):
        submit(scheduler, str(place), num_tokens, hits[str(place)])
    reached, complete = dict(hits), []

    while step := scheduler.next_step():
        assert sum(chunk.end - chunk.first for chunk in step) <= chunk_blocks * 64
        for chunk in step:
            assert chunk.first == reached[chunk.request_id] < chunk.end
            reached[chunk.request_id] = chunk.end
        complete += scheduler.computed(step)

    assert reached == {str(i): n for i, (n, _) in enumerate(prompts)}
    assert sorted(complete) == sorted(reached)
    assert scheduler.active_tokens == scheduler.waiting_tokens == 0


def test_blocks_are_kept_until_release() -> None:
    """Decode still pulls them after the prompt is computed."""
    scheduler = make_scheduler(num_blocks=2)
    submit(scheduler, "a", 128)
    assert scheduler.computed(scheduler.next_step()) == ["a"]
    scheduler.enqueue("b", 64)

    assert scheduler.admit(cold) == []
    assert scheduler.release("a")
    assert scheduler.admit(cold) == ["b"]


def test_a_cancelled_prompt_leaves_in_every_state() -> None:
    """Waiting, active, in a running step, complete: the pool returns to base."""
    scheduler = make_scheduler(num_blocks=4)
    submit(scheduler, "active", 128)
    submit(scheduler, "complete", 64)
    submit(scheduler, "in-step", 64)
    scheduler.enqueue("waiting", 256)
    step = scheduler.next_step()
    assert scheduler.release("in-step")
    assert set(scheduler.computed(step)) == {"active", "complete"}
    for request_id in ("waiting", "active", "complete"):
        assert scheduler.release(request_id)
        assert not scheduler.release(request_id)

    scheduler.enqueue("whole", 256)
    assert scheduler.admit(cold) == ["whole"]
    assert scheduler.active_tokens + scheduler.waiting_tokens == 256


def test_a_prompt_that_gets_no_blocks_now_waits() -> None:
    """The allocator has the last word."""
    scheduler = make_scheduler()
    scheduler.enqueue("a", 64)

    assert scheduler.admit(lambda _: None) == []
    assert scheduler.num_waiting == 1
    assert scheduler.admit(cold) == ["a"]
    assert scheduler.num_active == 1


def test_a_prompt_waits_for_who_computes_its_beginning_and_hurries_it() -> None:
    """Else each request of a burst would compute the common prefix, or wait behind strangers."""
    scheduler = make_scheduler(chunk_tokens=128)
    submit(scheduler, "long", 10_000)
    submit(scheduler, "other", 700)
    scheduler.enqueue("follower", 640)

    assert scheduler.admit(cold, {"follower": "long"}.get) == []
    assert scheduler.next_step() == [PlannedChunk("long", 0, 128)]
    assert scheduler.active_tokens == 10_000 + 700
    assert scheduler.admit(lambda _: 128) == ["follower"], "nobody leads it any more"
    assert [chunk.request_id for chunk in scheduler.next_step()] == ["follower"]


def test_a_leader_that_has_left_leads_nobody() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "gone", 1000)
    scheduler.release("gone")
    scheduler.enqueue("follower", 640)

    assert scheduler.admit(cold, lambda _: "gone") == ["follower"]


def test_a_turn_behind_a_long_cached_prefix_is_as_urgent_as_what_is_left_of_it() -> None:
    """Its whole length would put the one it waits for behind every stranger."""
    scheduler = make_scheduler(chunk_tokens=128)
    submit(scheduler, "leader", 160_000, hit=100_032)
    submit(scheduler, "stranger", 8000)
    scheduler.enqueue("turn", 100_224)

    scheduler.admit(cold, {"turn": "leader"}.get)

    assert [chunk.request_id for chunk in scheduler.next_step()] == ["leader"]


def test_a_long_prompt_that_comes_twice_does_not_go_before_short_turns() -> None:
    """What waits for it has as much left as itself, however little of that is its own."""
    scheduler = make_scheduler(chunk_tokens=128)
    submit(scheduler, "leader", 400_000)
    scheduler.enqueue("again", 400_000)
    submit_beside = {"again": "leader"}.get
    scheduler.enqueue("stranger", 500)

    assert scheduler.admit(cold, submit_beside) == ["stranger"]
    assert [chunk.request_id for chunk in scheduler.next_step()] == ["stranger"]


def test_impossible_and_repeated_prompts_are_refused() -> None:
    """At the door, by name."""
    scheduler = make_scheduler(num_blocks=2)
    submit(scheduler, "a", 128)

    with pytest.raises(TooLong):
        scheduler.enqueue("b", 129)
    with pytest.raises(BadRequest):
        scheduler.enqueue("a", 1)


@pytest.mark.parametrize("chunk_tokens", [0, 63, 100])
def test_a_budget_of_no_whole_blocks_is_refused(chunk_tokens: int) -> None:
    """A step could then make no progress."""
    with pytest.raises(ConfigError):
        make_scheduler(chunk_tokens)
