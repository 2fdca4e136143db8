import pytest

from services.kv_index import events
from services.kv_index.events import DEVICE_BIT, HOST_BIT, Change, Life
from shared import farspan_pb2 as pb
from shared.errors import BadRequest

A, B = b"a" * 16, b"b" * 16


def test_a_life_is_named_by_id_and_epoch() -> None:
    assert events.life_of(pb.WorkerRef(worker_id="w0", epoch=100)) == Life("w0", 100)
    for worker in (pb.WorkerRef(epoch=1), pb.WorkerRef(worker_id="w0")):
        with pytest.raises(BadRequest):
            events.life_of(worker)


@pytest.mark.parametrize("num_tokens", [0, 64, 127, 129, 1024])
def test_only_dense_spans_are_taken(num_tokens: int) -> None:
    """Hashes that stand for other than 64 tokens each: sliding windows, or blocks x ranks."""
    stored = pb.BlocksStored(tier=pb.TIER_HOST, block_hashes=A + B, num_tokens=num_tokens)
    batch = pb.BlockEvents(events=[pb.BlockEvent(stored=stored)])

    with pytest.raises(BadRequest, match="128 tokens"):
        events.changes(batch)

    stored.num_tokens = 128
    batch = pb.BlockEvents(events=[pb.BlockEvent(stored=stored)])
    assert events.changes(batch) == [Change(HOST_BIT, True, A + B)]


@pytest.mark.parametrize("block_tokens", [0, 16, 512])
def test_workers_with_other_blocks_are_refused(block_tokens: int) -> None:
    """Their hashes name other contents; the effective block of W ranks is no such block."""
    with pytest.raises(BadRequest, match=f"{block_tokens} tokens"):
        events.check_layout(pb.KvLayout(block_tokens=block_tokens))
    events.check_layout(pb.KvLayout(block_tokens=64, dcp_size=8))


def test_torn_hashes_are_refused() -> None:
    with pytest.raises(BadRequest, match="17 bytes"):
        events.whole(A + b"x")
    assert events.whole(A + B) == A + B


def test_changes_add_up_to_tiers() -> None:
    """Both ends of the copy are compared in this form."""
    changes = [
        Change(DEVICE_BIT, True, A + B),
        Change(HOST_BIT, True, B),
        Change(DEVICE_BIT, False, A),
    ]

    assert events.blocks(changes) == {A: 0, B: DEVICE_BIT | HOST_BIT}
