from benchmarks.placement.traces import Conversation, Session
from benchmarks.placement.workload import Clocked, Lanes
from shared.block_hash import HASH_BYTES
from tests.benchmarks.placement.plays import growing, request, session, turn


def test_a_lane_plays_on_when_its_session_has_drained() -> None:
    """So many sessions live at any time; a play shares no block with another."""
    lanes = Lanes([session("a", 3), session("b", 2)], 1, seed=4)
    ((_, now),) = lanes.first()
    spaces, seen = [now.space], [now.request_id]
    for step in range(12):
        ((_, now),) = lanes.ended(now, float(step))
        seen.append(now.request_id)
        spaces.append(now.space)

    assert len(set(seen)) == len(seen)
    assert spaces == sorted(spaces)
    assert spaces[-1] >= 4


def test_the_next_turn_comes_after_the_recorded_pause_five_minutes_at_most() -> None:
    """The benchmark caps idle time."""
    turns = (turn(5), turn(6, pause_s=7.5), turn(7, pause_s=4000))
    lanes = Lanes([Session("a", 100, (Conversation(turns),))], 1, seed=1)
    ((_, first),) = lanes.first()
    while first.place[2]:
        ((_, first),) = lanes.ended(first, 0.0)

    ((second_s, second),) = lanes.ended(first, 100.0)
    ((third_s, _),) = lanes.ended(second, 200.0)

    assert (second_s, third_s) == (107.5, 500.0)


def test_a_subagent_runs_beside_its_parent_and_the_lane_waits_for_both() -> None:
    """A lane's unit is the whole tree."""
    child = Conversation((turn(3), turn(4)), after_turn=0)
    lanes = Lanes([Session("a", 100, (growing(2), child)), session("b")], 2, seed=1)
    tree = next(one for _, one in lanes.first() if one.num_nodes == 100)
    while tree.place[2]:  # joined in its middle: go on to the next play that begins at the start
        arrivals = lanes.ended(tree, 0.0)
        tree = arrivals[0][1]

    arrivals = lanes.ended(tree, 0.0)
    child_first = next(one for _, one in arrivals if one.place[1] == 1)
    parent_last = next(one for _, one in arrivals if one.place[1] == 0)

    assert lanes.ended(parent_last, 1.0) == []
    ((_, child_last),) = lanes.ended(child_first, 2.0)
    assert child_last.space == tree.space
    ((at_s, following),) = lanes.ended(child_last, 3.0)
    assert (at_s, following.space != tree.space) == (3.0, True)


def test_equal_prefixes_have_equal_hashes_and_plays_have_their_own() -> None:
    """What a gateway would send: 16 bytes a block, and nothing in common between plays."""
    short, long = request([1, 2, 3]).block_hashes, request([1, 2, 3, 4]).block_hashes
    other = request([1, 2, 3], space=1).block_hashes

    assert len(short) == 3 * HASH_BYTES
    assert long.startswith(short)
    assert other[:HASH_BYTES] != short[:HASH_BYTES]


def test_the_same_seed_gives_the_same_arrivals() -> None:
    """A replay can be repeated."""
    plays = [session(str(i)) for i in range(10)]

    def arrivals(seed: int) -> list[tuple[float, int]]:
        return [(at_s, one.turn.num_tokens) for at_s, one in Lanes(plays, 5, seed).first()]

    assert arrivals(1) == arrivals(1) != arrivals(2)


def test_single_requests_that_continue_one_another_are_a_conversation() -> None:
    """Sticky sessions need a name for them; a block that everybody has ties nobody."""
    turns = [turn(3, first=0), turn(4, first=10), turn(6, first=10), turn(5, first=0)]

    names = [one.conversation for _, one in Clocked(turns).first()]

    assert names[1] == names[2]
    assert names[0] == names[3] != names[1]
