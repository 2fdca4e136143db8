"""What one life of a worker holds: its seat in the table, its place in its events, its digest.

Knows the table; knows no other life, no Redis, NATS or clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.kv_index.events import TIER_BITS, Change, Life
from services.kv_index.table import Table, Tally, tally_of
from shared.block_hash import HASH_BYTES

_NONE = Tally(0, 0)


class Extent(NamedTuple):
    """How far a life has been followed, and how much is known of it there."""

    sequence: int
    num_blocks: int  # of both tiers


@dataclass(frozen=True)
class Delta:
    """What one step changed at a life: the unit in which the durable copy follows."""

    life: Life
    previous: int | None  # the sequence it builds on; None: `changes` lead here from nothing
    sequence: int
    changes: tuple[Change, ...]


@dataclass
class Holdings:
    """One life's blocks, and how far its events have been followed."""

    life: Life
    seat: int
    sequence: int = 0  # the last batch applied
    announced: int = 0  # batches up to here exist, so what is missing of them is lost
    claimed: int = 0  # what the last heartbeat said
    claimed_digest: bytes = b""  # of what the worker holds at `claimed`; empty: it does not tell
    is_drifted: bool = False  # the worker says it holds something else
    num_heals: int = 0  # snapshots taken because of that or a gap, since the two last agreed
    healed_at: int | None = None  # the place in its events of the last of them
    is_doubted: bool = False  # its digest disagrees with its own snapshot
    # By tier: what the table has of it, and what it holds besides because the table was full.
    held: dict[int, Tally] = field(default_factory=lambda: dict.fromkeys(TIER_BITS, _NONE))
    left_out: dict[int, Tally] = field(default_factory=lambda: dict.fromkeys(TIER_BITS, _NONE))

    @property
    def num_cut(self) -> int:
        """Blocks left out because the table was full."""
        return sum(cut.num_blocks for cut in self.left_out.values())

    @property
    def extent(self) -> Extent:
        """What the durable copy must have of it, at least."""
        return Extent(self.sequence, sum(held.num_blocks for held in self.held.values()))

    def move(self, seat: int) -> None:
        """Hold nothing any more: nobody asks for the old seat's bits."""
        self.seat, self.is_drifted = seat, False
        self.held = dict.fromkeys(TIER_BITS, _NONE)
        self.left_out = dict.fromkeys(TIER_BITS, _NONE)

    @property
    def has_gap(self) -> bool:
        """Whether batches are lost."""
        return self.sequence < self.announced

    def claim(self, sequence: int, digest: bytes) -> None:
        """Learn from a heartbeat how far the worker is, and what it holds there.

        What the one before it claimed and has not arrived is lost, unless this one claims less:
        then one of the two is wrong, and the later one is believed.
        """
        self.announced = min(max(self.announced, self.claimed), sequence)
        self.claimed, self.claimed_digest = sequence, digest
        self.compare()

    def heal(self) -> None:
        """What it holds now is the worker's own snapshot: beyond it there is what it claims."""
        self.num_heals += 1
        self.healed_at = self.sequence
        self.announced = min(self.announced, max(self.sequence, self.claimed))

    def play(self, table: Table, changes: Iterable[Change]) -> list[Change]:
        """Apply changes; returned as far as there was room for them."""
        return [self._play(table, change) for change in changes]

    def whole(self, table: Table) -> Delta:
        """All there is, as one delta."""
        changes = (Change(bit, True, table.held(self.seat, bit)) for bit in TIER_BITS)
        return Delta(self.life, None, self.sequence, tuple(changes))

    def compare(self) -> None:
        """Learn from the worker's claim, if it is of this place in its events."""
        if self.sequence != self.claimed:
            return
        self.is_drifted = self.claimed_digest not in (b"", self._digest)
        if not self.is_drifted:
            self.num_heals, self.is_doubted = 0, False
        elif self.sequence == self.healed_at:  # anywhere else it may have drifted again since
            self.is_doubted = True

    @property
    def _digest(self) -> bytes:
        """Of all that the worker has told, left out or not: a full table hides no drift."""
        device, host = (self.held[bit].plus(self.left_out[bit]).digest for bit in TIER_BITS)
        return (device | host << 8 * HASH_BYTES).to_bytes(2 * HASH_BYTES, "little")

    def _play(self, table: Table, change: Change) -> Change:
        bit, is_stored, packed = change
        if is_stored:
            if len(packed) > table.num_left * HASH_BYTES:
                # The newest are left out: they are tails, and tails without heads are never found.
                packed, cut = table.fitting(packed)
                self.left_out[bit] = self.left_out[bit].plus(cut)
            self.held[bit] = self.held[bit].plus(table.add(self.seat, bit, packed))
        else:
            gone = table.discard(self.seat, bit, packed)
            self.held[bit] = self.held[bit].minus(gone)
            if self.left_out[bit].num_blocks:
                # What leaves the worker and was not here had been left out.
                left = self.left_out[bit].minus(tally_of(packed).minus(gone))
                self.left_out[bit] = Tally(max(1, left.num_blocks), left.digest)
                if not left.digest:  # also where a worker told of a block twice
                    self.left_out[bit] = _NONE
        return change._replace(packed=packed)
