import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv_index.events import Life, blocks, snapshot_changes
from services.kv_index.index import Index
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash, pack
from shared.block_journal import BlockJournal
from shared.errors import WorkerLost

WORKER = pb.WorkerRef(worker_id="w0", epoch=5)
HASHES = [BlockHash(bytes([i]) * 16) for i in range(1, 9)]
TIERS = st.sampled_from([pb.TIER_DEVICE, pb.TIER_HOST])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared", "commit"]),
        TIERS,
        st.lists(st.sampled_from(HASHES), max_size=4),
    ),
    max_size=30,
)


def ask(from_sequence: int) -> pb.ReplayRequest:
    return pb.ReplayRequest(worker=WORKER, from_sequence=from_sequence)


def test_batches_are_numbered_without_holes_and_only_when_there_is_something_to_say() -> None:
    """The index takes every hole for a loss."""
    journal = BlockJournal(WORKER)

    journal.stored(pb.TIER_DEVICE, HASHES[:2])
    journal.removed(pb.TIER_DEVICE, [])
    first = journal.commit()
    nothing = journal.commit()
    journal.cleared()
    second = journal.commit()

    assert first is not None and second is not None and nothing is None
    assert (first.sequence, second.sequence, journal.sequence) == (1, 2, 2)
    assert [event.WhichOneof("event") for event in first.events] == ["stored"]


def test_only_changes_are_told() -> None:
    """An index follows by them the digest of blocks that it has no room for."""
    journal = BlockJournal(WORKER)

    journal.stored(pb.TIER_DEVICE, [*HASHES[:2], HASHES[0]])
    journal.stored(pb.TIER_DEVICE, HASHES[:3])
    journal.removed(pb.TIER_DEVICE, HASHES[2:4])
    batch = journal.commit()

    assert batch is not None
    first, second, third = batch.events
    assert first.stored.block_hashes == pack(HASHES[:2])
    assert (second.stored.block_hashes, second.stored.num_tokens) == (pack(HASHES[2:3]), 64)
    assert third.removed.block_hashes == pack(HASHES[2:3])
    journal.stored(pb.TIER_DEVICE, HASHES[:1])
    journal.removed(pb.TIER_HOST, HASHES)
    assert journal.commit() is None


def test_a_replay_gives_the_batches_from_the_asked_one_on() -> None:
    """And none when the asker is up to date."""
    journal = BlockJournal(WORKER)
    for block_hash in HASHES:
        journal.stored(pb.TIER_HOST, [block_hash])
        journal.commit()

    assert [batch.sequence for batch in journal.replay(ask(6)).batches] == [6, 7, 8]
    assert journal.replay(ask(9)) == pb.ReplayReply()
    assert journal.replay(ask(0)).HasField("snapshot")


def test_another_life_is_not_answered_for() -> None:
    """Its sequence numbers mean other batches."""
    journal = BlockJournal(WORKER)
    other = pb.WorkerRef(worker_id="w0", epoch=4)

    with pytest.raises(WorkerLost):
        journal.replay(pb.ReplayRequest(worker=other, from_sequence=1))


@given(STEPS, st.integers(1, 5), st.integers(0, 40))
@settings(deadline=None)
def test_any_replay_brings_an_index_up_to_date(
    steps: list[tuple[str, pb.Tier, list[BlockHash]]], num_kept: int, num_seen: int
) -> None:
    """Wherever the index stopped listening, batches or a snapshot give the same blocks."""
    journal, complete, late = BlockJournal(WORKER, num_kept), Index(), Index()
    for kind, tier, hashes in [*steps, ("commit", pb.TIER_HOST, [])]:
        if kind == "stored":
            journal.stored(tier, hashes)
        elif kind == "removed":
            journal.removed(tier, hashes)
        elif kind == "cleared":
            journal.cleared()
        elif (batch := journal.commit()) is not None:
            complete.apply(batch)
            if batch.sequence <= num_seen:
                late.apply(batch)

    life = next(iter(complete.sequences), None)
    if life is None:
        return
    reply = journal.replay(ask(late.sequences.get(life, 0) + 1))
    if reply.HasField("snapshot"):
        late.restore(life, reply.snapshot.sequence, snapshot_changes(reply.snapshot))
    for batch in reply.batches:
        late.apply(batch)

    late_whole, whole = late.whole(life), complete.whole(life)
    assert late_whole is not None and whole is not None
    assert late_whole.sequence == whole.sequence
    assert blocks(late_whole.changes) == blocks(whole.changes)


@given(STEPS)
@settings(deadline=None)
def test_the_digest_is_that_of_the_blocks_held_at_the_last_commit(
    steps: list[tuple[str, pb.Tier, list[BlockHash]]],
) -> None:
    """An index at the same sequence computes it from its own table, and must get the same."""
    journal, index = BlockJournal(WORKER), Index()
    life = Life(WORKER.worker_id, WORKER.epoch)
    for kind, tier, hashes in [*steps, ("commit", pb.TIER_HOST, [])]:
        if kind == "stored":
            journal.stored(tier, hashes)
        elif kind == "removed":
            journal.removed(tier, hashes)
        elif kind == "cleared":
            journal.cleared()
        elif (batch := journal.commit()) is not None:
            index.apply(batch)
        heartbeat = pb.Heartbeat()
        journal.describe(heartbeat)
        assert len(heartbeat.block_digest) == 32
        index.heartbeat(life, heartbeat.event_sequence, heartbeat.block_digest)

        assert not index.is_drifted(life)
