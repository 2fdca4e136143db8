import random

import pytest

from services.kv_index import search
from services.kv_index.search import Holders, Step
from services.kv_index.table import Table
from shared import farspan_pb2 as pb

DEVICE, HOST = 1, 2
NUM_BLOCKS = 300
CHAIN = random.Random(1).randbytes(16 * NUM_BLOCKS)
SEATS = list(range(40))  # more than one plane has


def blocks(first: int, end: int) -> bytes:
    return CHAIN[16 * first : 16 * end]


def seat(*seats: int) -> int:
    return sum(map(search.bit_of, seats))


def longest(table: Table) -> tuple[list[Step], bool]:
    return search.longest(CHAIN, table.columns, Holders(SEATS))


@pytest.fixture
def table() -> Table:
    table = Table(10_000)
    table.add_plane()
    return table


@pytest.mark.parametrize("seed", range(30))
def test_everybodys_end_is_found(table: Table, seed: int) -> None:
    """Any lengths, in both tiers: the host's part goes as far as the two together."""
    choice = random.Random(seed)
    expected = set()
    for number in choice.sample(SEATS, choice.randint(0, 12)):
        on_device, on_host = choice.choices([0, 1, 2, 7, 150, 299, 300, choice.randrange(300)], k=2)
        table.add(number, DEVICE, blocks(0, on_device))
        table.add(number, HOST, blocks(0, on_host))
        if on_device or on_host:
            tier = pb.TIER_DEVICE if on_device >= on_host else pb.TIER_HOST
            expected.add((max(on_device, on_host), number, tier))

    steps, is_broken = longest(table)

    found = {
        (num_blocks, number, tier)
        for num_blocks, seats, tier in steps
        for number in SEATS
        if seats & seat(number)
    }
    assert found == expected
    assert not is_broken
    assert [step.num_blocks for step in steps] == sorted(step.num_blocks for step in steps)


def test_a_hole_ends_the_prefix_and_is_told(table: Table) -> None:
    """Tail before head is the workers' promise; evenly spread probes find a hole worth finding."""
    table.add(0, DEVICE, blocks(0, 300))
    table.add(1, DEVICE, blocks(0, 300))
    table.discard(1, DEVICE, blocks(40, 100))

    steps, is_broken = longest(table)

    assert steps == [Step(40, seat(1), pb.TIER_DEVICE), Step(300, seat(0), pb.TIER_DEVICE)]
    assert is_broken


def test_a_hole_too_small_to_be_seen_costs_at_most_a_placement(table: Table) -> None:
    """The answer may be longer than the truth, and is never longer than the last block held."""
    table.add(0, DEVICE, blocks(0, 200))
    table.discard(0, DEVICE, blocks(55, 56))

    (step,), _ = longest(table)

    assert step.num_blocks in (55, 200)


def test_seats_that_do_not_live_are_not_found(table: Table) -> None:
    """A past life's bits stand in the table until it is tidied."""
    table.add(0, DEVICE, blocks(0, 10))
    table.add(5, DEVICE, blocks(0, 20))

    steps, _ = search.longest(CHAIN, table.columns, Holders([5]))

    assert steps == [Step(20, seat(5), pb.TIER_DEVICE)]
    assert search.longest(b"", table.columns, Holders([5])) == ([], False)
