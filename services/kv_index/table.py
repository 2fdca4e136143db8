"""The hot structure: which seats hold which block, in columns of numpy arrays. See ADR-0008.

A hash table over 16-byte hashes, laid out like Python's dict: dense entries in order of arrival,
and a sparse array of entry numbers. Every seat has two bits of an entry's mask: device and host.
Knows bits and packed hashes; knows no workers, lives or sequences.
"""

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]

SEATS_PER_PLANE = 32  # two bits each
_MIN_BITS = 10
_AT_ONCE = 8192  # entries moved at once: more would leave the cache


class Columns(NamedTuple):
    """What a scalar search reads: plain integers, no array in between."""

    shift: int  # a key's home is both words XORed, times `factor`, modulo 2**64, shifted by this
    last: int  # the last place of `entries`
    factor: int
    entries: memoryview  # 0: nothing was ever here
    low: memoryview  # a key's two words
    high: memoryview
    planes: list[memoryview]  # of masks


class Tally(NamedTuple):
    """Different blocks: how many, and all of them XORed."""

    num_blocks: int
    digest: int

    def plus(self, others: "Tally") -> "Tally":
        """Together with others."""
        return Tally(self.num_blocks + others.num_blocks, self.digest ^ others.digest)

    def minus(self, some: "Tally") -> "Tally":
        """Without some of them."""
        return Tally(self.num_blocks - some.num_blocks, self.digest ^ some.digest)


class Table:
    """Who holds which block; at most `max_blocks` of them.

    A place of the sparse array stays taken until the next rehash, so that searches that passed over
    it find their way. It may name an entry that has been freed, or given to another block since:
    then the keys differ and the search goes on.
    """

    def __init__(self, max_blocks: int) -> None:
        # Hashes are even (ADR-0003). The factor is secret, so that nobody can choose prompts whose
        # blocks share one home all the same.
        self._factor = np.uint64(secrets.randbits(64) | 1)
        self._nobody = np.uint64(secrets.randbits(64))  # the first word of an entry that is free
        # Reserved at once, but the system gives memory only to pages that are written.
        self._low, self._high = (np.zeros(max_blocks + 1, np.uint64) for _ in range(2))
        self._low[0] = self._nobody
        self._planes = [np.zeros(max_blocks + 1, np.uint64)]
        self._free: list[I64] = []  # entries that nobody holds any more
        self._num_free = 0
        self._num_used = 1  # entries ever used; number 0 means none
        self._make_room(_MIN_BITS)

    @property
    def num_blocks(self) -> int:
        """Blocks that somebody holds, or held until his seat is vacated."""
        return self._num_used - 1 - self._num_free

    @property
    def num_left(self) -> int:
        """Further blocks there is room for."""
        return len(self._low) - 1 - self.num_blocks

    @property
    def num_seats(self) -> int:
        """Seats there are."""
        return len(self._planes) * SEATS_PER_PLANE

    @property
    def columns(self) -> Columns:
        """For searches; valid until the next change of the table."""
        return self._columns

    def add(self, seat: int, tier_bit: int, packed: bytes) -> Tally:
        """Set a seat's bit for these blocks; there must be room for all. Returns whose was not."""
        low, high = _words(packed)
        plane, bit = self._place(seat, tier_bit)
        at, entries, is_there = self._find(low, high)
        known = entries[is_there]
        masks = plane.take(known)
        fresh = _distinct(known[(masks & bit) == 0])
        plane[known] = masks | bit
        if known.size < low.size:
            new = np.flatnonzero(~is_there)
            low, high, at = low[new], high[new], at[new]
            if self._rehash_for(new.size):
                at, _, _ = self._find(low, high)
            fresh = np.concatenate((fresh, self._insert(at, low, high, plane, bit)))
        return self._tally(fresh)

    def fitting(self, packed: bytes) -> tuple[bytes, Tally]:
        """These hashes as far as there is room for them, and the different ones left out.

        What is in the table needs no room. Of the new ones the first are kept.
        """
        low, high = _words(packed)
        _, _, is_there = self._find(low, high)
        new = np.flatnonzero(~is_there)
        order = np.lexsort((low[new], high[new]))  # equal ones stay in order
        low, high = low[new[order]], high[new[order]]
        is_first = np.concatenate(([True], (low[1:] != low[:-1]) | (high[1:] != high[:-1])))
        distinct = np.sort(new[order[is_first[: new.size]]])
        kept, cut = np.split(distinct, [self.num_left])
        is_there[kept] = True
        words = np.frombuffer(packed, "<u8").reshape(-1, 2)
        return words[is_there].tobytes(), tally_of(words[cut].tobytes())

    def discard(self, seat: int, tier_bit: int, packed: bytes) -> Tally:
        """Clear a seat's bit for these blocks; returns those that had it."""
        plane, bit = self._place(seat, tier_bit)
        _, entries, is_there = self._find(*_words(packed))
        entries = entries[is_there]
        had = _distinct(entries[(plane[entries] & bit) != 0])
        plane[had] &= ~bit
        gone = self._tally(had)
        self._give_back(had[~self._is_held(had)])
        return gone

    def held(self, seat: int, tier_bit: int) -> bytes:
        """All blocks that have a seat's bit, packed, in order of arrival as far as is known."""
        plane, bit = self._place(seat, tier_bit)
        entries = np.flatnonzero(plane[: self._num_used] & bit)
        return np.stack((self._low[entries], self._high[entries]), 1).astype("<u8").tobytes()

    def vacate(self, seats: list[int]) -> None:
        """Clear both bits of these seats everywhere."""
        used = slice(1, self._num_used)
        was_held = self._is_held(used)
        for seat in seats:
            plane, bits = self._place(seat, 3)
            plane[used] &= ~bits
        self._give_back(np.flatnonzero(was_held & ~self._is_held(used)) + 1)

    def add_plane(self) -> None:
        """Room for further seats."""
        self._planes.append(np.zeros(len(self._low), np.uint64))
        self._expose()

    def _place(self, seat: int, tier_bit: int) -> tuple[U64, np.uint64]:
        number, place = divmod(seat, SEATS_PER_PLANE)
        return self._planes[number], np.uint64(tier_bit << 2 * place)

    def _make_room(self, bits: int) -> None:
        self._shift, self._last = np.uint64(64 - bits), np.int64((1 << bits) - 1)
        self._entries: U32 = np.zeros(1 << bits, np.uint32)
        self._num_taken = 0
        self._expose()

    def _expose(self) -> None:
        self._columns = Columns(
            int(self._shift),
            int(self._last),
            int(self._factor),
            self._entries.data,
            self._low.data,
            self._high.data,
            [plane.data for plane in self._planes],
        )

    def _rehash_for(self, num_new: int) -> bool:
        """At most a quarter of the places may be taken: each step of a search costs a round."""
        if 4 * (self._num_taken + num_new) <= len(self._entries):
            return False
        used = np.flatnonzero(self._is_held(slice(0, self._num_used)))
        self._make_room(max(_MIN_BITS, (8 * (len(used) + num_new) - 1).bit_length()))
        for begin in range(0, len(used), _AT_ONCE):
            self._settle(used[begin : begin + _AT_ONCE])
        return True

    def _settle(self, entries: I64) -> None:
        """Give a place to entries whose keys are different and have none."""
        at = self._home(self._low[entries], self._high[entries])
        step = 0
        while entries.size:
            at = (at + step) & self._last
            is_free = self._entries[at] == 0
            self._entries[at[is_free]] = entries[is_free]
            is_settled = self._entries[at] == entries
            self._num_taken += int(is_settled.sum())
            at, entries = at[~is_settled], entries[~is_settled]
            step += 1

    def _home(self, low: U64, high: U64) -> I64:
        return (((low ^ high) * self._factor) >> self._shift).view(np.int64)

    def _find(self, low: U64, high: U64) -> tuple[I64, U32, Flags]:
        """For every key the place and the entry at which its search ended, and if it is there."""
        at = self._home(low, high)
        entries = self._entries.take(at)
        is_there = self._has(entries, low, high)
        todo = np.flatnonzero((entries != 0) & ~is_there)
        step = 1
        while todo.size:
            further = (at[todo] + step) & self._last
            found = self._entries.take(further)
            is_same = self._has(found, low[todo], high[todo])
            at[todo], entries[todo], is_there[todo] = further, found, is_same
            todo = todo[(found != 0) & ~is_same]
            step += 1  # 1, 3, 6, 10... from home: such steps meet every place of a power of two
        return at, entries, is_there

    def _has(self, entries: U32, low: U64, high: U64) -> Flags:
        """Whether these are the keys of these entries."""
        is_same: Flags = (self._low.take(entries) == low) & (self._high.take(entries) == high)
        return is_same

    def _is_held(self, entries: U32 | I64 | slice) -> Flags:
        is_held: Flags = self._planes[0][entries] != 0
        for plane in self._planes[1:]:
            is_held |= plane[entries] != 0
        return is_held

    def _insert(self, at: I64, low: U64, high: U64, plane: U64, bit: np.uint64) -> I64:
        """New entries with one bit, at the free places where the searches for them ended."""
        inserted: list[I64] = []
        while at.size:
            entries = self._take(at.size)
            self._entries[at] = entries
            # Two keys may have found one free place: who was written last has it.
            is_first = self._entries[at] == entries
            self._give_back(entries[~is_first])
            entries, won = entries[is_first], np.flatnonzero(is_first)
            self._low[entries], self._high[entries] = low[won], high[won]
            plane[entries] = bit
            self._num_taken += entries.size
            inserted.append(entries)
            left = np.flatnonzero(~is_first)
            at, low, high = at[left], low[left], high[left]
            if at.size:  # a key named twice is there by now
                at, _, is_there = self._find(low, high)
                at, low, high = at[~is_there], low[~is_there], high[~is_there]
        return inserted[0] if len(inserted) == 1 else np.concatenate(inserted)

    def _take(self, count: int) -> I64:
        """Free entries, in a row as far as possible: searches then walk memory in order."""
        parts = []
        while count and self._free:
            part = self._free.pop()
            if part.size > count:
                self._free.append(part[count:])
            parts.append(part[:count])
            self._num_free -= parts[-1].size
            count -= parts[-1].size
        if count:
            parts.append(np.arange(self._num_used, self._num_used + count))
            self._num_used += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _give_back(self, entries: I64) -> None:
        if entries.size:
            self._low[entries] = self._nobody
            self._free.append(entries.astype(np.int64))
            self._num_free += entries.size

    def _tally(self, entries: I64) -> Tally:
        return _xored(self._low[entries], self._high[entries])


def tally_of(packed: bytes) -> Tally:
    """These hashes, which must be different."""
    return _xored(*_words(packed))


def _xored(low: U64, high: U64) -> Tally:
    low_digest, high_digest = (int(np.bitwise_xor.reduce(words)) for words in (low, high))
    return Tally(low.size, low_digest | high_digest << 64)


def _words(packed: bytes) -> tuple[U64, U64]:
    """The first and the second word of every hash."""
    words = np.frombuffer(packed, "<u8").reshape(-1, 2)
    return np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])


def _distinct(entries: U32) -> I64:
    """These entries, each once; most calls name none twice."""
    ordered = np.sort(entries).astype(np.int64)
    is_new = ordered[1:] != ordered[:-1]
    return ordered if is_new.all() else np.concatenate((ordered[:1], ordered[1:][is_new]))
