from functools import reduce
from operator import xor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv_index.table import Table, Tally

# Their words' XOR is 0 or 1, so all share two homes; and half of them a first word.
KEYS = [
    word.to_bytes(8, "little") + (word ^ i).to_bytes(8, "little")
    for word in range(12)
    for i in (0, 1)
]
SEATS = [0, 1, 31, 40]  # the last one stands in the second plane
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "discard", "vacate"]),
        st.sampled_from(SEATS),
        st.sampled_from([1, 2]),
        st.lists(st.sampled_from(KEYS), max_size=12),
    ),
    max_size=40,
)


def table_of(max_blocks: int = 1000) -> Table:
    table = Table(max_blocks)
    table.add_plane()
    return table


def tally(keys: set[bytes]) -> Tally:
    return Tally(len(keys), reduce(xor, (int.from_bytes(key, "little") for key in keys), 0))


def parted(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


@given(STEPS)
@settings(deadline=None)
def test_the_table_equals_sets_of_hashes(steps: list[tuple[str, int, int, list[bytes]]]) -> None:
    """Whatever is added, taken away and added again, twice in one event or by two seats."""
    table = table_of()
    sets: dict[tuple[int, int], set[bytes]] = {
        (seat, bit): set() for seat in SEATS for bit in (1, 2)
    }
    for kind, seat, bit, keys in steps:
        held = sets[seat, bit]
        if kind == "add":
            assert table.add(seat, bit, b"".join(keys)) == tally(set(keys) - held)
            held.update(keys)
        elif kind == "discard":
            assert table.discard(seat, bit, b"".join(keys)) == tally(set(keys) & held)
            held.difference_update(keys)
        else:
            table.vacate([seat])
            sets[seat, 1], sets[seat, 2] = set(), set()

    for (seat, bit), keys_held in sets.items():
        found = parted(table.held(seat, bit))
        assert len(found) == len(set(found))
        assert set(found) == keys_held
    assert table.num_blocks == len(set().union(*sets.values()))


@pytest.mark.parametrize("num_at_once", [1, 700])
def test_room_is_used_again_for_as_long_as_blocks_come_and_go(num_at_once: int) -> None:
    """The table is never larger than its limit, and never loses room to the past."""
    table, seen = table_of(max_blocks=1000), 0
    for _ in range(5000 // num_at_once):
        packed = b"".join((seen + i).to_bytes(16, "little") for i in range(num_at_once))
        seen += num_at_once
        assert table.add(0, 1, packed).num_blocks == num_at_once
        assert table.num_left == 1000 - num_at_once
        assert table.discard(0, 1, packed).num_blocks == num_at_once
    assert table.num_blocks == 0


def test_many_blocks_are_all_found_again() -> None:
    """Over several rehashes."""
    table = table_of(max_blocks=100_000)
    packed = b"".join((i << 40).to_bytes(16, "little") for i in range(50_000))
    for begin in range(0, len(packed), 8192):
        table.add(3, 2, packed[begin : begin + 8192])

    assert table.num_blocks == 50_000
    assert table.held(3, 2) == packed, "in order of arrival"
    assert table.add(3, 2, packed).num_blocks == 0


def test_a_full_table_takes_what_still_fits() -> None:
    """The caller asks for the room there is; the last block is a block like any other."""
    table = table_of(max_blocks=5)
    table.add(0, 1, b"".join(KEYS[:3]))
    assert table.num_left == 2

    table.add(1, 1, b"".join(KEYS[:5]))
    assert table.num_left == 0
    assert table.discard(1, 1, KEYS[4]).num_blocks == 1
    assert table.num_left == 1
