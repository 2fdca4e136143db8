"""The longest prefix of every holder at once, by bisecting a packed chain of hashes.

Workers evict a chain's tail before its head, so the set of holders only shrinks along the chain and
an equal set at both ends of a span is the set in all of it. Evenly spread probes catch a worker
that broke the rule; then the whole chain is walked. Knows the table's columns, no worker.
"""

from collections.abc import Callable
from typing import NamedTuple

from services.kv_index.table import Columns
from shared import farspan_pb2 as pb
from shared.block_hash import HASH_BYTES

_NUM_PROBES = 16
_MAX_KNOWN = 65_536
_WORD = 2**64 - 1

Reader = Callable[[int], int]  # place in the chain -> who holds this block and all probed before


class Step(NamedTuple):
    """Where the set of holders shrinks."""

    num_blocks: int  # held by those who leave
    seats: int  # bits of the seats whose blocks end here
    tier: pb.Tier  # the slowest that any of these blocks lies in


class Holders(dict[int, int]):
    """Mask of an entry -> who counts: bit 2s for a seat that holds the block, 2s + 1 on the device.

    Filled as masks are met; a new one is made when seats come or go.
    """

    def __init__(self, live_seats: list[int]) -> None:
        super().__init__()
        self._held_bits = sum(map(bit_of, live_seats))

    def __missing__(self, mask: int) -> int:
        device = mask & self._held_bits
        found = (mask | mask >> 1) & self._held_bits | device << 1
        if len(self) < _MAX_KNOWN:
            self[mask] = found
        return found

    def steps(self, num_blocks: int, lost: int) -> list[Step]:
        """Who leaves where these bits are lost: together with the device's, or without them."""
        seats = lost & self._held_bits
        on_device = lost >> 1 & seats
        both = (on_device, pb.TIER_DEVICE), (seats & ~on_device, pb.TIER_HOST)
        return [Step(num_blocks, seats, tier) for seats, tier in both if seats]


def bit_of(seat: int) -> int:
    """A seat's bit in what the search finds, and the first of its two in masks of all planes."""
    return 1 << 2 * seat


def longest(packed: bytes, columns: Columns, holders: Holders) -> tuple[list[Step], bool]:
    """Where the holders of the first block leave the chain; and whether somebody broke the rule."""
    num_blocks = len(packed) // HASH_BYTES
    read = _reader(packed, columns, holders)
    first = read(0) if num_blocks else 0
    if not first:
        return [], False
    ends = _bisect(read, num_blocks, first)
    is_broken = not _holds(read, first, ends)
    if is_broken:
        ends = _walk(read, num_blocks, first)
    return [step for end, lost in ends for step in holders.steps(end, lost)], is_broken


def _reader(packed: bytes, columns: Columns, holders: Holders) -> Reader:
    chain = memoryview(packed).cast("Q")
    shift, last, factor, entries, low, high, (plane, *further) = columns

    def read(place: int) -> int:
        first, second = chain[2 * place], chain[2 * place + 1]
        at = ((first ^ second) * factor & _WORD) >> shift
        entry = entries[at]
        step = 1
        while entry:
            if low[entry] == first and high[entry] == second:
                mask = plane[entry]
                if further:
                    for number, other in enumerate(further, 1):
                        mask |= other[entry] << 64 * number
                return holders[mask]
            at = (at + step) & last
            step += 1
            entry = entries[at]
        return 0

    return read


def _bisect(read: Reader, num_blocks: int, first: int) -> list[tuple[int, int]]:
    """Ends of the spans in which the set of holders is equal, and who leaves there."""
    ends: list[tuple[int, int]] = []
    at, here = 0, first
    ahead = [(num_blocks, 0), (num_blocks - 1, read(num_blocks - 1))]  # the next one last
    while here:
        end, after = ahead.pop()
        after &= here
        if after == here:
            at = end
            continue
        while end - at > 1:
            middle = (at + end) >> 1
            seen = read(middle) & here
            if seen == here:
                at = middle
            elif seen == after:
                end = middle
            else:
                ahead.append((end, after))
                end, after = middle, seen
        ends.append((end, here & ~after))
        at, here = end, after
    return ends


def _holds(read: Reader, first: int, ends: list[tuple[int, int]]) -> bool:
    """Whether evenly spread blocks are held by those who are said to hold them."""
    stride = max(1, ends[-1][0] // _NUM_PROBES)
    here, at = first, 0
    for end, lost in ends:
        while at < end:
            if here & ~read(at):
                return False
            at += stride
        here &= ~lost
    return True


def _walk(read: Reader, num_blocks: int, first: int) -> list[tuple[int, int]]:
    """What `_bisect` gives, whatever is held: every block is asked."""
    ends: list[tuple[int, int]] = []
    here = first
    for place in range(1, num_blocks):
        seen = read(place) & here
        if seen != here:
            ends.append((place, here & ~seen))
            here = seen
        if not here:
            return ends
    return [*ends, (num_blocks, here)]
