"""Which worker holds which block, in memory: apply events, answer longest prefixes.

Knows worker lives, tiers and sequence numbers; knows no Redis, NATS or clock. Only a worker's
current life has a seat in the table, so a restart or a clear drops everything in one step and
nothing old is ever found.
"""

from collections.abc import Sequence
from typing import NamedTuple

from services.kv_index import events, search
from services.kv_index.events import Change, Cleared, End, Life
from services.kv_index.holdings import Delta, Extent, Holdings
from services.kv_index.search import Holders
from services.kv_index.table import Table
from shared import farspan_pb2 as pb
from shared.block_hash import HASH_BYTES

_MAX_KNOWN_SETS = 4096
_NEVER = (0, End.SILENT)
MAX_OVER = 4096  # workers that are gone; what is late of them comes within seconds
# Of the table: with less room whole workers are not asked for again, with more they always are.
_ROOM_AGAIN, _ENOUGH_ROOM = 0.1, 0.5


class Hit(NamedTuple):
    """A life that holds a prompt's first `num_blocks` blocks, the slowest of them in `tier`."""

    life: Life
    num_blocks: int
    tier: pb.Tier


class Index:
    """The blocks of every worker's current life, at most `max_blocks` different ones."""

    def __init__(self, max_blocks: int = 1 << 20) -> None:
        self._table = Table(max_blocks)
        self.max_blocks = max_blocks
        self._workers: dict[str, Holdings] = {}
        self._over: dict[str, tuple[int, End]] = {}  # worker id -> its last end, oldest first
        self._free_seats = list(reversed(range(self._table.num_seats)))
        self._left_seats: list[int] = []  # whose bits still stand in the table
        self._at_bits: dict[int, tuple[int, Life]] = {}  # seat's bit -> rank among lives, life
        self._known_sets: dict[int, list[tuple[int, Life]]] = {}
        self._holders = Holders([])
        self.num_cut = 0
        self.num_broken_chains = 0

    @property
    def sequences(self) -> dict[Life, int]:
        """The last applied batch of every worker's current life, 0 before the first."""
        return {holdings.life: holdings.sequence for holdings in self._workers.values()}

    @property
    def extents(self) -> dict[Life, Extent]:
        """How much is known of every worker's current life."""
        return {holdings.life: holdings.extent for holdings in self._workers.values()}

    def sequence(self, life: Life) -> int:
        """The last applied batch of a life; 0 before the first, and if it is not known."""
        holdings = self._known(life)
        return holdings.sequence if holdings is not None else 0

    @property
    def num_blocks(self) -> int:
        """Different blocks in memory."""
        return self._table.num_blocks

    def apply(self, batch: pb.BlockEvents) -> Delta | None:
        """Follow the next batch; None if it is a duplicate, of a past life, or after a gap.

        After a gap `first_missing` says what to ask for. Raises BadRequest, changing nothing.
        """
        life, changes = events.life_of(batch.worker), events.changes(batch)
        holdings = self._current(life)
        if holdings is None:
            return None
        holdings.announced = max(holdings.announced, batch.sequence)
        if batch.sequence != holdings.sequence + 1:
            return None
        previous: int | None = holdings.sequence
        played: list[Change] = []
        for change in changes:
            if isinstance(change, Cleared):
                self._reseat(holdings)
                played, previous = [], None
            else:
                played += self._play(holdings, [change])
        holdings.sequence = batch.sequence
        holdings.compare()
        return Delta(life, previous, batch.sequence, tuple(played))

    def heartbeat(self, life: Life, event_sequence: int, digest: bytes = b"") -> Delta | None:
        """Note how far a worker says it is; the delta is given if its life begins with this.

        Events and heartbeats arrive on separate subscriptions, so a heartbeat may be ahead for a
        moment: only the next one shows a loss.
        """
        before = self._workers.get(life.worker_id)
        holdings = self._current(life)
        if holdings is None:
            return None
        holdings.claim(event_sequence, digest)
        return self.whole(life) if holdings is not before else None

    def first_missing(self, life: Life) -> int | None:
        """The sequence from which `life` must replay; None if nothing is known to be lost."""
        holdings = self._known(life)
        if holdings is None or not holdings.has_gap:
            return None
        return holdings.sequence + 1

    def is_drifted(self, life: Life) -> bool:
        """Whether a life holds, by its own digest, something else than is known of it."""
        holdings = self._known(life)
        return holdings is not None and holdings.is_drifted

    def num_heals(self, life: Life) -> int:
        """Snapshots taken of a life because of drift or a gap, since its claims last agreed."""
        holdings = self._known(life)
        return 0 if holdings is None else holdings.num_heals

    @property
    def doubted(self) -> set[Life]:
        """Lives whose digest disagrees with their own snapshot, at the place it was taken at."""
        return {holdings.life for holdings in self._workers.values() if holdings.is_doubted}

    @property
    def counts(self) -> dict[str, int]:
        """For the metrics: workers of which not all is known, and why."""
        workers = self._workers.values()
        return {
            "cut_workers": sum(holdings.num_cut > 0 for holdings in workers),
            "gap_workers": sum(holdings.has_gap for holdings in workers),
            "drifted_workers": sum(holdings.is_drifted for holdings in workers),
        }

    def is_cut(self, life: Life) -> bool:
        """Whether blocks of a life were left out, and there is room for them now.

        Blocks are left out of a full table only, so each further snapshot takes that much room to
        come free first, however many batches arrive meanwhile.
        """
        holdings = self._known(life)
        if holdings is None or not holdings.num_cut:
            return False
        room = self._table.num_left / self.max_blocks
        return room > _ROOM_AGAIN and room >= min(holdings.num_cut / self.max_blocks, _ENOUGH_ROOM)

    def restore(self, life: Life, sequence: int, changes: Sequence[Change]) -> Delta | None:
        """Take over a whole state; None if `life` is over or has been followed further."""
        holdings = self._current(life)
        if holdings is None or sequence < holdings.sequence:
            return None
        is_heal = holdings.is_drifted or holdings.has_gap
        self._reseat(holdings)
        played = self._play(holdings, changes)
        holdings.sequence = sequence
        if is_heal:
            holdings.heal()
        holdings.compare()
        return Delta(life, None, sequence, tuple(played))

    def whole(self, life: Life) -> Delta | None:
        """All that a life holds as one delta; None if it is over."""
        holdings = self._known(life)
        return None if holdings is None else holdings.whole(self._table)

    def is_over(self, life: Life) -> bool:
        """Whether a life is past, so that what still arrives of it is late."""
        return life.epoch <= self.past_epoch(life.worker_id)

    def past_epoch(self, worker_id: str) -> int:
        """The last epoch in which nothing of a worker is followed any more; 0 if there is none."""
        epoch, _ = self._over.get(worker_id, _NEVER)
        holdings = self._workers.get(worker_id)
        return epoch if holdings is None else max(epoch, holdings.life.epoch - 1)

    def is_refused(self, life: Life) -> bool:
        """Whether a life is over because it was refused, and the worker has begun no other."""
        is_last = life.worker_id not in self._workers
        return is_last and self._over.get(life.worker_id) == (life.epoch, End.REFUSED)

    @property
    def over(self) -> dict[Life, End]:
        """Every worker's last life that is over for good, as far as is remembered."""
        return {Life(worker_id, epoch): end for worker_id, (epoch, end) in self._over.items()}

    def retire(self, life: Life, end: End) -> Life | None:
        """Forget a worker, and unless it may return hear nothing more of this or an older life.

        Returns the life that ended; None if the worker is not known or has begun a later one.
        """
        holdings = self._workers.get(life.worker_id)
        if holdings is not None and holdings.life.epoch > life.epoch:
            return None
        if end is not End.SILENT:
            self._note_over(life, end)
        if holdings is None:
            return None
        del self._workers[life.worker_id]
        self._left_seats.append(holdings.seat)
        self._seats_changed()
        return holdings.life

    def tidy(self) -> bool:
        """Free what past lives held; False if there was nothing. A few ms for a million blocks."""
        if not self._left_seats:
            return False
        self._table.vacate(self._left_seats)
        self._free_seats += self._left_seats
        self._left_seats = []
        return True

    def longest_prefix(self, packed: bytes) -> list[Hit]:
        """Every worker that holds at least the first block, and how far it goes, in order."""
        steps, is_broken = search.longest(packed, self._table.columns, self._holders)
        self.num_broken_chains += is_broken
        ranked = [
            (rank, Hit(life, num_blocks, tier))
            for num_blocks, seats, tier in steps
            for rank, life in self._lives_at(seats)
        ]
        ranked.sort()
        return [hit for _, hit in ranked]

    def _lives_at(self, seats: int) -> list[tuple[int, Life]]:
        """Rank and life of everyone who sits there; the same few sets are met again and again."""
        lives = self._known_sets.get(seats)
        if lives is None:
            lives = sorted(at for bit, at in self._at_bits.items() if bit & seats)
            if len(self._known_sets) < _MAX_KNOWN_SETS:
                self._known_sets[seats] = lives
        return lives

    def _play(self, holdings: Holdings, changes: Sequence[Change]) -> list[Change]:
        if sum(len(change.packed) for change in changes) > self._table.num_left * HASH_BYTES:
            self.tidy()  # the dead make room first
        before = holdings.num_cut
        played = holdings.play(self._table, changes)
        self.num_cut += max(0, holdings.num_cut - before)
        return played

    def _known(self, life: Life) -> Holdings | None:
        holdings = self._workers.get(life.worker_id)
        return holdings if holdings is not None and holdings.life == life else None

    def _current(self, life: Life) -> Holdings | None:
        """The holdings of `life`, empty at first; None if it is over."""
        if self.is_over(life):
            return None
        holdings = self._workers.get(life.worker_id)
        if holdings is None or holdings.life.epoch < life.epoch:
            if holdings is not None:
                self._left_seats.append(holdings.seat)
            holdings = self._workers[life.worker_id] = Holdings(life, self._take_seat())
            self._seats_changed()
        return holdings

    def _note_over(self, life: Life, end: End) -> None:
        last = self._over.pop(life.worker_id, _NEVER)
        is_news = life.epoch > last[0] or (life.epoch == last[0] and end is End.STOPPED)
        self._over[life.worker_id] = (life.epoch, end) if is_news else last
        if len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]

    def _reseat(self, holdings: Holdings) -> None:
        self._left_seats.append(holdings.seat)
        holdings.move(self._take_seat())
        self._seats_changed()

    def _take_seat(self) -> int:
        if not self._free_seats and not self.tidy():
            first = self._table.num_seats
            self._table.add_plane()
            self._free_seats += reversed(range(first, self._table.num_seats))
        return self._free_seats.pop()

    def _seats_changed(self) -> None:
        by_life = sorted(self._workers.values(), key=lambda holdings: holdings.life)
        self._at_bits = {
            search.bit_of(holdings.seat): (rank, holdings.life)
            for rank, holdings in enumerate(by_life)
        }
        self._known_sets = {}
        self._holders = Holders([holdings.seat for holdings in by_life])
