"""Lanes are lent once, and not again while a read may still land in them."""

import threading
import time

import numpy as np
import pytest

from shared import farspan_pb2 as pb
from shared.engine.handoff.staging import Lanes, allocate_slots, slots_per_lane
from shared.errors import ConfigError, Overloaded

LAYOUT = pb.KvLayout(num_mla_layers=2, row_bytes=10, num_index_layers=1, index_page_bytes=640)
SLOT_BYTES = 2 * 64 * 10 + 640


class FakeRead:
    """A read that is over when the test says so."""

    def __init__(self) -> None:
        self.ended = False

    def is_over(self) -> bool:
        return self.ended


def soon() -> float:
    return time.monotonic() + 0.02


def test_two_pulls_never_share_a_lane() -> None:
    """Slots of different lanes are disjoint, and a third pull waits its turn in vain."""
    lanes = Lanes(num_lanes=2, num_slots=3)

    with lanes.borrow(soon()) as first, lanes.borrow(soon()) as second:
        assert {first.first_slot, second.first_slot} == {0, 3}
        with pytest.raises(Overloaded), lanes.borrow(soon()):
            pass


def test_a_lane_comes_back_to_the_one_who_waits() -> None:
    """A waiting pull goes on as soon as a lane is free, well before its deadline."""
    lanes = Lanes(num_lanes=1, num_slots=1)
    got = threading.Event()

    def wait_for_lane() -> None:
        with lanes.borrow(time.monotonic() + 10):
            got.set()

    with lanes.borrow(soon()):
        waiter = threading.Thread(target=wait_for_lane)
        waiter.start()
        assert not got.wait(0.02)

    assert got.wait(5)
    waiter.join()


def test_a_lane_with_an_unfinished_read_is_quarantined_until_the_read_is_over() -> None:
    """The read may still write the slots; lending them would corrupt another request."""
    lanes = Lanes(num_lanes=1, num_slots=1)
    read = FakeRead()
    with pytest.raises(RuntimeError), lanes.borrow(soon()) as lane:
        lane.reads.append(read)
        raise RuntimeError("the pull gives up")

    assert lanes.num_quarantined == 1
    with pytest.raises(Overloaded, match="1 quarantined"), lanes.borrow(soon()):
        pass

    read.ended = True
    with lanes.borrow(soon()) as again:
        assert again is lane
    assert lanes.num_quarantined == 0


def test_slots_and_descriptors_are_numbered_alike() -> None:
    """A wrong number would let one slot's bytes land in another."""
    slots = allocate_slots(LAYOUT, num_slots=4)
    chosen = np.array([1, 3])

    assert [len(tensor) for tensor in (*slots.extents, *slots.words)] == [4, 4, 4, 4]
    assert slots.extent_ids(chosen).tolist() == [1, 3, 5, 7]
    assert slots.word_ids(2, chosen).tolist() == [6, 1, 3]
    assert slots.mla[0].nbytes + slots.index[0].nbytes == SLOT_BYTES


def test_staging_too_small_for_a_block_is_a_wrong_setting() -> None:
    """It can never work, so the worker refuses to start and says the numbers."""
    assert slots_per_lane(LAYOUT, 4 * SLOT_BYTES, num_lanes=2) == 2
    with pytest.raises(ConfigError, match=str(SLOT_BYTES)):
        slots_per_lane(LAYOUT, 2 * SLOT_BYTES - 1, num_lanes=2)
