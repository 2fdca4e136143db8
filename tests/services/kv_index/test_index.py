from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import xor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv_index.events import DEVICE_BIT, Change, End, Life, blocks, snapshot_changes
from services.kv_index.holdings import Delta
from services.kv_index.index import Hit, Index
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash, pack
from shared.block_journal import BlockJournal
from shared.errors import BadRequest

LIFE = Life("w0", 100)
CHAIN = [BlockHash(bytes([i]) * 16) for i in range(1, 101)]


def batch(sequence: int, *events: pb.BlockEvent, life: Life = LIFE) -> pb.BlockEvents:
    worker = pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch)
    return pb.BlockEvents(worker=worker, sequence=sequence, events=events)


def stored(hashes: Sequence[BlockHash], tier: pb.Tier = pb.TIER_DEVICE) -> pb.BlockEvent:
    packed, num_tokens = pack(hashes), 64 * len(hashes)
    event = pb.BlocksStored(tier=tier, block_hashes=packed, num_tokens=num_tokens)
    return pb.BlockEvent(stored=event)


def removed(hashes: Sequence[BlockHash], tier: pb.Tier = pb.TIER_DEVICE) -> pb.BlockEvent:
    return pb.BlockEvent(removed=pb.BlocksRemoved(tier=tier, block_hashes=pack(hashes)))


def cleared() -> pb.BlockEvent:
    return pb.BlockEvent(cleared=pb.BlocksCleared())


def test_the_longest_prefix_is_found_for_every_worker_that_has_a_part_of_it() -> None:
    """The router weighs all of them, so none is left out and the order is fixed."""
    index = Index()
    other = Life("w1", 7)
    index.apply(batch(1, stored(CHAIN[:3]), life=other))
    index.apply(batch(1, stored(CHAIN[:90])))

    hits = index.longest_prefix(pack(CHAIN))

    assert hits == [Hit(LIFE, 90, pb.TIER_DEVICE), Hit(other, 3, pb.TIER_DEVICE)]


def test_a_prompt_nobody_knows_has_no_hits() -> None:
    """Also when its later blocks are known: a hit begins at the first block."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:3])))

    assert index.longest_prefix(b"") == []
    assert index.longest_prefix(pack([CHAIN[50], *CHAIN[:3]])) == []


def test_a_new_epoch_drops_all_hits_of_the_old_one() -> None:
    """A restarted worker has empty pools; its old blocks would be wrong hints (B1, B2)."""
    index = Index()
    index.apply(batch(1, stored(CHAIN)))

    index.heartbeat(Life("w0", 101), 0)

    assert index.longest_prefix(pack(CHAIN)) == []
    assert index.apply(batch(2, stored(CHAIN))) is None, "the old life speaks no more"
    assert index.longest_prefix(pack(CHAIN)) == []


def test_all_cleared_drops_everything_before_it_and_nothing_after() -> None:
    """A clear in the middle of a batch is an event like any other (B4)."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:5])))

    delta = index.apply(batch(2, stored(CHAIN[5:9]), cleared(), stored(CHAIN[:2])))

    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 2, pb.TIER_DEVICE)]
    assert delta is not None
    assert delta.previous is None, "the durable copy must drop the rest too"
    assert blocks(delta.changes) == dict.fromkeys(CHAIN[:2], DEVICE_BIT)


def test_a_block_in_two_tiers_stays_until_it_has_left_both() -> None:
    """Leaving HBM for the host tier is not leaving the worker (B6)."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:4]), stored(CHAIN[:4], pb.TIER_HOST)))

    index.apply(batch(2, removed(CHAIN[2:4])))
    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 4, pb.TIER_HOST)]
    assert index.longest_prefix(pack(CHAIN[:2])) == [Hit(LIFE, 2, pb.TIER_DEVICE)]

    index.apply(batch(3, removed(CHAIN[3:4], pb.TIER_HOST)))
    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 3, pb.TIER_HOST)]


def test_a_repeated_batch_changes_nothing() -> None:
    """Replays overlap with what has arrived (B8)."""
    index = Index()
    first, second = batch(1, stored(CHAIN[:9])), batch(2, removed(CHAIN[4:9]))
    for message in (first, second, first, second, first):
        index.apply(message)

    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 4, pb.TIER_DEVICE)]
    assert index.num_blocks == 4


def test_a_gap_keeps_what_is_known_and_says_what_to_ask_for() -> None:
    """Nothing after the gap is applied, or a removal could be undone by an older store (B11)."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9])))

    assert index.apply(batch(4, stored(CHAIN[9:12]))) is None
    assert index.first_missing(LIFE) == 2
    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 9, pb.TIER_DEVICE)]

    for sequence in (2, 3, 4):
        index.apply(batch(sequence, stored(CHAIN[9:12])))
    assert index.first_missing(LIFE) is None


def test_a_lost_tail_shows_at_the_second_heartbeat() -> None:
    """The first may only have overtaken the events; an idle worker sends nothing but heartbeats."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9])))

    index.heartbeat(LIFE, 2)
    assert index.first_missing(LIFE) is None

    index.heartbeat(LIFE, 2)
    assert index.first_missing(LIFE) == 2


def test_an_absurd_claim_is_forgotten_when_the_next_one_is_smaller() -> None:
    """One wrong heartbeat must not mean snapshots without end."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9])))

    index.heartbeat(LIFE, 10**12)
    index.heartbeat(LIFE, 1)
    assert index.first_missing(LIFE) is None

    for claim in (10**12, 10**12):
        index.heartbeat(LIFE, claim)
    assert index.first_missing(LIFE) == 2
    index.heartbeat(LIFE, 1)
    assert index.first_missing(LIFE) is None


def test_a_batch_with_an_absurd_number_is_forgotten_with_the_snapshot_it_causes() -> None:
    """A snapshot is all there is, up to what has been claimed since."""
    index = Index()
    index.heartbeat(LIFE, 0)
    index.apply(batch(10**12, stored(CHAIN[:9])))
    assert index.first_missing(LIFE) == 1

    index.restore(LIFE, 5, [])
    assert index.first_missing(LIFE) is None


def test_what_was_claimed_while_a_snapshot_was_on_its_way_is_still_missing() -> None:
    index = Index()
    for _ in range(2):
        index.heartbeat(LIFE, 7)
    index.restore(LIFE, 5, [])

    assert index.first_missing(LIFE) == 6


def test_snapshots_that_do_not_end_a_gap_are_counted_until_the_claims_agree() -> None:
    """Also of a worker that tells no digest."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9])))
    for num_heals in (1, 2, 3):
        for _ in range(2):
            index.heartbeat(LIFE, 10**12)
        index.restore(LIFE, 1, [Change(DEVICE_BIT, True, pack(CHAIN[:9]))])
        assert index.num_heals(LIFE) == num_heals

    index.heartbeat(LIFE, 1)
    assert index.num_heals(LIFE) == 0


def test_a_snapshot_replaces_everything_unless_it_is_old() -> None:
    """A slow answer must not undo what has been followed since."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9])))

    snapshot = pb.BlockSnapshot(
        sequence=7, device_block_hashes=pack(CHAIN[:2]), host_block_hashes=pack(CHAIN[1:5])
    )
    assert index.restore(LIFE, 7, snapshot_changes(snapshot)) is not None
    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 5, pb.TIER_HOST)]
    assert index.longest_prefix(pack(CHAIN[:2])) == [Hit(LIFE, 2, pb.TIER_DEVICE)]

    assert index.restore(LIFE, 6, []) is None
    assert index.restore(Life("w0", 99), 50, []) is None
    assert index.sequences == {LIFE: 7}


def test_a_retired_worker_is_gone_unless_it_came_back() -> None:
    """Retiring races with a restart: the new life wins."""
    index = Index()
    index.apply(batch(1, stored(CHAIN)))
    index.heartbeat(Life("w0", 101), 0)

    assert not index.retire(LIFE, End.STOPPED)
    assert index.retire(Life("w0", 101), End.STOPPED)
    assert index.sequences == {}


def test_nothing_late_of_a_life_that_is_over_is_taken_over() -> None:
    """Its events travel on another subscription than its goodbye, and replays take their time."""
    index = Index()
    index.apply(batch(1, stored(CHAIN)))
    index.retire(LIFE, End.STOPPED)

    assert index.apply(batch(1, stored(CHAIN))) is None
    assert index.heartbeat(LIFE, 1) is None
    assert index.restore(LIFE, 1, [Change(DEVICE_BIT, True, pack(CHAIN))]) is None
    assert index.apply(batch(1, stored(CHAIN), life=Life("w0", 99))) is None
    assert index.is_over(LIFE)
    assert index.sequences == {}

    assert index.apply(batch(1, stored(CHAIN[:2]), life=Life("w0", 101))) is not None
    assert index.sequences == {Life("w0", 101): 1}


def test_a_life_may_end_before_anything_else_was_heard_of_it() -> None:
    """Then the one before it ends too."""
    index = Index()
    index.apply(batch(1, stored(CHAIN)))

    assert index.retire(Life("w0", 101), End.STOPPED) == LIFE
    assert index.retire(Life("w1", 5), End.STOPPED) is None
    assert index.apply(batch(2, stored(CHAIN[:1]))) is None
    assert index.apply(batch(1, stored(CHAIN), life=Life("w1", 5))) is None
    assert index.sequences == {}


def test_a_life_that_may_return_returns() -> None:
    """Silence is no proof of death."""
    index = Index()
    index.apply(batch(1, stored(CHAIN)))
    index.retire(LIFE, End.SILENT)

    assert index.apply(batch(1, stored(CHAIN))) is not None


def test_a_refused_life_stays_out_until_it_stops_or_another_begins() -> None:
    """An event that is not understood may have removed blocks, and no snapshot tells which."""
    index = Index()
    index.apply(batch(1, stored(CHAIN)))
    assert index.retire(LIFE, End.REFUSED) == LIFE
    assert index.is_refused(LIFE)
    assert index.heartbeat(LIFE, 1) is None
    index.retire(LIFE, End.SILENT)
    assert index.is_refused(LIFE), "silence makes no event understood"

    index.retire(LIFE, End.STOPPED)
    index.retire(LIFE, End.REFUSED)
    assert (index.is_over(LIFE), index.is_refused(LIFE)) == (True, False)
    assert index.over == {LIFE: End.STOPPED}

    later = Life("w0", 101)
    index.retire(later, End.REFUSED)
    index.heartbeat(Life("w0", 102), 0)
    assert not index.is_refused(later)
    assert index.is_over(later)


def test_a_bounded_number_of_workers_that_are_gone_is_remembered() -> None:
    index = Index()
    for number in range(5000):
        index.retire(Life(f"gone-{number}", 7), End.STOPPED)

    assert index.is_over(Life("gone-4999", 7))
    assert not index.is_over(Life("gone-0", 7))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(batch(1, stored(CHAIN[:1], pb.TIER_UNSPECIFIED)), id="no-tier"),
        pytest.param(batch(1, pb.BlockEvent()), id="unknown-kind"),
        pytest.param(batch(1, stored([BlockHash(b"short")])), id="partial-hash"),
        pytest.param(batch(1, stored(CHAIN), life=Life("", 1)), id="no-worker"),
        pytest.param(batch(1, stored(CHAIN), life=Life("w0", 0)), id="no-epoch"),
    ],
)
def test_an_unclear_batch_is_refused_as_a_whole(message: pb.BlockEvents) -> None:
    """Skipping a part would leave an index that is wrong and looks right."""
    index = Index()

    with pytest.raises(BadRequest):
        index.apply(message)

    assert index.sequences == {}


def test_a_worker_that_breaks_the_eviction_rule_is_not_believed_beyond_the_hole() -> None:
    """Tail before head is the workers' promise; probes find a hole of any size worth finding."""
    index = Index()
    index.apply(batch(1, stored(CHAIN), removed(CHAIN[10:30])))

    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 10, pb.TIER_DEVICE)]


STEPS_OF_TWO = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["stored", "stored", "removed", "cleared", "snapshot"]),
        st.sampled_from([pb.TIER_DEVICE, pb.TIER_HOST]),
        st.lists(st.sampled_from(CHAIN[:12]), max_size=6),
    ),
    max_size=30,
)


def digest(device: Sequence[BlockHash], host: Sequence[BlockHash] = ()) -> bytes:
    def folded(hashes: Sequence[BlockHash]) -> bytes:
        return reduce(xor, (int.from_bytes(h, "little") for h in hashes), 0).to_bytes(16, "little")

    return folded(device) + folded(host)


def test_a_digest_at_the_same_place_shows_silent_drift() -> None:
    """The engine dropped blocks and said nothing (B9)."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9]), stored(CHAIN[:4], pb.TIER_HOST)))

    index.heartbeat(LIFE, 1, digest(CHAIN[:9], CHAIN[:4]))
    assert not index.is_drifted(LIFE)
    index.heartbeat(LIFE, 1, digest(CHAIN[:7], CHAIN[:4]))
    assert index.is_drifted(LIFE)

    index.restore(LIFE, 2, [Change(DEVICE_BIT, True, pack(CHAIN[:7]))])
    assert not index.is_drifted(LIFE)
    index.heartbeat(LIFE, 2, digest(CHAIN[:7]))
    assert not index.is_drifted(LIFE)
    assert not index.doubted


def test_a_digest_of_another_place_says_nothing() -> None:
    """Heartbeats and events overtake one another; the events decide when to compare."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9])))

    index.heartbeat(LIFE, 2, digest(CHAIN[:3]))
    assert not index.is_drifted(LIFE)
    index.apply(batch(2, stored(CHAIN[9:12])))
    assert index.is_drifted(LIFE)


def test_a_digest_that_its_own_snapshot_contradicts_is_doubted_until_they_agree() -> None:
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9])))
    index.heartbeat(LIFE, 1, digest(CHAIN[:3]))
    for num_heals in (1, 2):
        index.restore(LIFE, 1, [Change(DEVICE_BIT, True, pack(CHAIN[:9]))])
        assert (index.doubted, index.num_heals(LIFE)) == ({LIFE}, num_heals)

    index.heartbeat(LIFE, 1, digest(CHAIN[:9]))
    assert (index.doubted, index.num_heals(LIFE)) == (set(), 0)


def test_a_worker_that_drifts_again_after_its_snapshot_is_not_doubted() -> None:
    """A busy worker's snapshot is ahead of its heartbeat, and an engine's fault comes twice."""
    index = Index()
    index.apply(batch(1, stored(CHAIN[:9])))
    index.heartbeat(LIFE, 1, digest(CHAIN[:7]))
    index.restore(LIFE, 2, [Change(DEVICE_BIT, True, pack(CHAIN[:7]))])

    index.apply(batch(3))
    index.heartbeat(LIFE, 3, digest(CHAIN[:5]))

    assert index.is_drifted(LIFE)
    assert (index.doubted, index.num_heals(LIFE)) == (set(), 1)


def test_a_full_index_leaves_out_the_newest_blocks_and_counts_them() -> None:
    """They are tails; heads, which many prompts share, stay. Nothing found is ever wrong."""
    index = Index(max_blocks=20)
    index.apply(batch(1, stored(CHAIN[:15])))
    delta = index.apply(batch(2, stored(CHAIN[15:30])))

    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 20, pb.TIER_DEVICE)]
    assert (index.num_blocks, index.num_cut) == (20, 10)
    assert delta is not None
    assert blocks(delta.changes).keys() == set(CHAIN[15:20]), "the copy is bounded too"


def test_a_full_index_hides_no_drift() -> None:
    """Above nine tenths no room comes free for a snapshot: phantom hits would stay for ever."""
    index = Index(max_blocks=20)
    index.apply(batch(1, stored(CHAIN[50:65]), life=Life("w1", 1)))
    index.apply(batch(1, stored(CHAIN[:10]), stored(CHAIN[:15], pb.TIER_HOST)))
    index.heartbeat(LIFE, 1, digest(CHAIN[:10], CHAIN[:15]))
    assert (index.num_cut, index.is_drifted(LIFE)) == (15, False), "left out, but told"

    index.apply(batch(2))
    index.heartbeat(LIFE, 2, digest([], CHAIN[:15]))
    assert index.is_drifted(LIFE)
    index.restore(LIFE, 2, snapshot_changes(pb.BlockSnapshot(host_block_hashes=pack(CHAIN[2:15]))))

    assert index.is_drifted(LIFE), "the snapshot says something else again"
    index.heartbeat(LIFE, 2, digest([], CHAIN[2:15]))
    assert not index.is_drifted(LIFE)
    assert index.longest_prefix(pack(CHAIN)) == []


def test_blocks_left_out_again_and_again_are_gone_when_they_are_removed_once() -> None:
    """Nobody counts wrong for ever, though our own workers tell each block once."""
    index = Index(max_blocks=20)
    index.apply(batch(1, stored(CHAIN[50:70]), life=Life("w1", 1)))
    index.apply(batch(1, *[stored(CHAIN[:10])] * 31))
    index.apply(batch(2, removed(CHAIN[:10])))
    index.retire(Life("w1", 1), End.STOPPED)
    index.tidy()

    assert not index.is_cut(LIFE)
    index.heartbeat(LIFE, 2, digest([]))
    assert not index.is_drifted(LIFE)
    assert index.num_cut == 310, "a counter: it never falls"


def snapshot_of(journal: BlockJournal, life: Life) -> pb.BlockSnapshot:
    worker = pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch)
    return journal.replay(pb.ReplayRequest(worker=worker)).snapshot


@given(STEPS_OF_TWO)
@settings(deadline=None)
def test_a_true_digest_agrees_however_much_was_left_out(
    steps: list[tuple[int, str, pb.Tier, list[BlockHash]]],
) -> None:
    """And then nothing is found that is not there."""
    index = Index(max_blocks=5)
    lives = [Life("w0", 1), Life("w1", 1)]
    journals = [BlockJournal(pb.WorkerRef(worker_id=life.worker_id, epoch=1)) for life in lives]
    for number, kind, tier, hashes in steps:
        life, journal = lives[number], journals[number]
        if kind == "stored":
            journal.stored(tier, hashes)
        elif kind == "removed":
            journal.removed(tier, hashes)
        elif kind == "cleared":
            journal.cleared()
        else:
            snapshot = snapshot_of(journal, life)
            index.restore(life, snapshot.sequence, snapshot_changes(snapshot))
        if (message := journal.commit()) is not None:
            index.apply(message)
        heartbeat = pb.Heartbeat()
        journal.describe(heartbeat)
        index.heartbeat(life, heartbeat.event_sequence, heartbeat.block_digest)

        assert not any(index.is_drifted(each) for each in lives)
        assert index.num_blocks <= 5
        whole = index.whole(life)
        assert whole is not None
        truth = blocks(snapshot_changes(snapshot_of(journal, life)))
        assert all(truth.get(key, 0) & bits == bits for key, bits in blocks(whole.changes).items())


def test_what_was_left_out_is_asked_for_when_there_is_room() -> None:
    index = Index(max_blocks=20)
    other = Life("w1", 1)
    index.apply(batch(1, stored(CHAIN[50:65]), life=other))
    index.apply(batch(1, stored(CHAIN[:15])))
    assert not index.is_cut(LIFE)

    index.retire(other, End.STOPPED)
    index.tidy()
    assert index.is_cut(LIFE)
    index.restore(LIFE, 1, [Change(DEVICE_BIT, True, pack(CHAIN[:15]))])

    assert not index.is_cut(LIFE)
    assert index.longest_prefix(pack(CHAIN)) == [Hit(LIFE, 15, pb.TIER_DEVICE)]


def test_what_another_worker_or_tier_holds_already_needs_no_room() -> None:
    """Else a nearly full index forgets shared heads, and asks for snapshots for ever."""
    index = Index(max_blocks=20)
    other = Life("w1", 1)
    index.apply(batch(1, stored(CHAIN[:15]), life=other))
    index.apply(batch(1, stored(CHAIN[:15]), stored(CHAIN[:15], pb.TIER_HOST)))
    assert index.num_cut == 0

    index.restore(LIFE, 2, [Change(DEVICE_BIT, True, pack([*CHAIN[:15], *CHAIN[:10]]))])
    assert (index.num_cut, index.is_cut(LIFE)) == (0, False)
    assert index.longest_prefix(pack(CHAIN)) == [
        Hit(LIFE, 15, pb.TIER_DEVICE),
        Hit(other, 15, pb.TIER_DEVICE),
    ]
    index.heartbeat(LIFE, 2, digest(CHAIN[:10]))
    assert index.is_drifted(LIFE), "nothing is left out, so the digest says something"


def test_of_a_batch_that_does_not_fit_the_first_new_blocks_are_kept() -> None:
    index = Index(max_blocks=20)
    index.apply(batch(1, stored(CHAIN[:15]), life=Life("w1", 1)))

    twice = [block_hash for block_hash in CHAIN[:25] for _ in range(2)]
    index.apply(batch(1, stored(twice)))

    assert index.longest_prefix(pack(CHAIN))[0] == Hit(LIFE, 20, pb.TIER_DEVICE)
    assert (index.num_blocks, index.num_cut) == (20, 5)


def test_a_cut_worker_is_asked_again_only_when_what_was_left_out_fits() -> None:
    """Snapshots of a worker must not come one a batch: each is tens of megabytes."""
    index = Index(max_blocks=50)
    other = Life("w1", 1)
    index.apply(batch(1, stored(CHAIN[:40]), life=other))
    index.apply(batch(1, stored(CHAIN[40:70])))

    index.apply(batch(2, removed(CHAIN[30:40]), life=other))
    assert not index.is_cut(LIFE), "10 are free, 20 are left out"
    index.apply(batch(3, removed(CHAIN[20:30]), life=other))
    assert index.is_cut(LIFE)

    index.restore(LIFE, 1, [Change(DEVICE_BIT, True, pack(CHAIN[40:75]))])
    assert not index.is_cut(LIFE)
    for sequence in range(2, 12):
        index.apply(batch(sequence, stored(CHAIN[75:77])))
        assert not index.is_cut(LIFE)


def test_a_worker_that_gave_up_what_was_left_out_is_compared_again() -> None:
    index = Index(max_blocks=20)
    index.apply(batch(1, stored(CHAIN[:30])))
    index.apply(batch(2, removed(CHAIN[15:30])))

    index.heartbeat(LIFE, 2, digest(CHAIN[:15]))
    assert not index.is_drifted(LIFE)
    index.heartbeat(LIFE, 2, digest(CHAIN[:14]))
    assert index.is_drifted(LIFE)


def test_the_dead_make_room_for_the_living() -> None:
    """A restart of a worker that fills the index finds the index empty."""
    index = Index(max_blocks=20)
    for epoch in range(1, 100):
        life = Life("w0", epoch)
        index.apply(batch(1, stored(CHAIN[:20]), life=life))
        index.apply(batch(2, cleared(), stored(CHAIN[20:40]), life=life))
        assert index.longest_prefix(pack(CHAIN[20:])) == [Hit(life, 20, pb.TIER_DEVICE)]
        assert index.longest_prefix(pack(CHAIN)) == []
    assert index.num_cut == 0


def test_a_fleet_larger_than_a_plane_of_seats_is_kept_apart() -> None:
    """Also while its workers come and go."""
    index = Index()
    for epoch in (1, 2, 3):
        for number in range(70):
            life = Life(f"w{number:02}", epoch)
            index.apply(batch(1, stored(CHAIN[: number + 1]), life=life))
    hits = index.longest_prefix(pack(CHAIN))

    assert hits == [Hit(Life(f"w{n:02}", 3), n + 1, pb.TIER_DEVICE) for n in range(70)]


# A small world, so that every rule meets every other: two chains with one head, two workers.
TRUNK = CHAIN[:4]
CHAINS = [[*TRUNK, *CHAIN[10:14]], [*TRUNK, *CHAIN[20:24]]]
STEPS = st.tuples(
    st.sampled_from(["store", "evict", "clear", "restart", "repeat", "stale", "lose"]),
    st.sampled_from(["w0", "w1"]),
    st.sampled_from([pb.TIER_DEVICE, pb.TIER_HOST]),
    st.integers(0, 1),
    st.integers(1, 8),
)


class Model:
    """The index's meaning: a set of hashes for each tier of each worker, and nothing clever."""

    def __init__(self) -> None:
        self.epoch = {"w0": 1, "w1": 1}
        self.log: dict[str, list[pb.BlockEvents]] = {"w0": [], "w1": []}
        self.reset("w0")
        self.reset("w1")

    def reset(self, worker: str) -> None:
        tiers = getattr(self, "tiers", {})
        tiers[worker] = {pb.TIER_DEVICE: set(), pb.TIER_HOST: set()}
        self.tiers: dict[str, dict[pb.Tier, set[BlockHash]]] = tiers

    def life(self, worker: str) -> Life:
        return Life(worker, self.epoch[worker])

    def emit(self, worker: str, *events: pb.BlockEvent) -> pb.BlockEvents:
        message = batch(len(self.log[worker]) + 1, *events, life=self.life(worker))
        self.log[worker].append(message)
        return message

    def evictable(self, worker: str, tier: pb.Tier, count: int) -> list[BlockHash]:
        """Up to `count` blocks, each after all blocks behind it: a chain's tail before its head."""
        held = set(self.tiers[worker][tier])
        victims: list[BlockHash] = []
        while len(victims) < count:
            needed = {head for chain in CHAINS for head, tail in pairwise(chain) if tail in held}
            leaves = sorted(held - needed)
            if not leaves:
                break
            victims.append(leaves[0])
            held.discard(leaves[0])
        return victims

    def prefix(self, worker: str, chain: list[BlockHash]) -> tuple[int, pb.Tier] | None:
        device, host = (self.tiers[worker][tier] for tier in (pb.TIER_DEVICE, pb.TIER_HOST))
        num_blocks = 0
        while num_blocks < len(chain) and chain[num_blocks] in device | host:
            num_blocks += 1
        if not num_blocks:
            return None
        is_device = all(block_hash in device for block_hash in chain[:num_blocks])
        return num_blocks, pb.TIER_DEVICE if is_device else pb.TIER_HOST


def play(model: Model, index: Index, step: tuple[str, str, pb.Tier, int, int]) -> None:
    """One step in the model; what the worker would send reaches the index, or is lost."""
    kind, worker, tier, chain, count = step
    if kind in ("store", "lose"):
        hashes = CHAINS[chain][:count]
        model.tiers[worker][tier].update(hashes)
        message = model.emit(worker, stored(hashes, tier))
        if kind == "store":
            index.apply(message)
    elif kind == "evict":
        victims = model.evictable(worker, tier, count)
        model.tiers[worker][tier].difference_update(victims)
        index.apply(model.emit(worker, removed(victims, tier)))
    elif kind == "clear":
        model.reset(worker)
        index.apply(model.emit(worker, cleared()))
    elif kind == "restart":
        model.epoch[worker] += 1
        model.log[worker] = []
        model.reset(worker)
        index.heartbeat(model.life(worker), 0)
    elif kind == "repeat":
        for message in model.log[worker][-count:]:
            index.apply(message)
    elif kind == "stale" and model.epoch[worker] > 1:
        past = Life(worker, model.epoch[worker] - 1)
        index.apply(batch(1, stored(CHAINS[chain], tier), life=past))
        index.restore(past, 99, [Change(DEVICE_BIT, True, pack(CHAINS[chain]))])


def heal(model: Model, index: Index) -> None:
    """What the service does after two heartbeats: ask for what is missing."""
    for worker in model.epoch:
        for _ in range(2):
            index.heartbeat(model.life(worker), len(model.log[worker]))
        first = index.first_missing(model.life(worker))
        if first is not None:
            for message in model.log[worker][first - 1 :]:
                index.apply(message)


@given(st.lists(STEPS, max_size=40))
@settings(deadline=None)
def test_the_index_equals_sets_of_hashes(steps: list[tuple[str, str, pb.Tier, int, int]]) -> None:
    """Whatever is stored, evicted, cleared, restarted, repeated, late or lost and replayed."""
    model, index = Model(), Index()
    for step in steps:
        play(model, index, step)
    heal(model, index)

    for chain in CHAINS:
        found = {hit.life: (hit.num_blocks, hit.tier) for hit in index.longest_prefix(pack(chain))}
        expected = {model.life(worker): model.prefix(worker, chain) for worker in model.epoch}
        assert found == {life: hit for life, hit in expected.items() if hit is not None}


class CopiedIndex(Index):
    """An index whose deltas a copy follows, as the durable one does."""

    def __init__(self) -> None:
        super().__init__()
        self.copy: dict[Life, list[Change]] = {}

    def apply(self, batch: pb.BlockEvents) -> Delta | None:
        delta = super().apply(batch)
        if delta is not None:
            before = [] if delta.previous is None else self.copy.get(delta.life, [])
            self.copy[delta.life] = [*before, *delta.changes]
        return delta


@given(st.lists(STEPS, max_size=40))
@settings(deadline=None)
def test_following_the_deltas_gives_the_same_blocks(
    steps: list[tuple[str, str, pb.Tier, int, int]],
) -> None:
    """The durable copy sees deltas only; applied in order they are the index."""
    model, index = Model(), CopiedIndex()
    for step in steps:
        if step[0] != "stale":
            play(model, index, step)
    heal(model, index)

    for life in index.sequences:
        whole = index.whole(life)
        assert whole is not None
        copied = blocks(index.copy.get(life, []))
        assert {key: bits for key, bits in copied.items() if bits} == blocks(whole.changes)
