"""One sequence's hot rows: for each index-sharing group, which host rows lie in its leased pages.

Table, LRU and plan exist once per group, since all layers of a group select the same rows. Rows are
known by their global host row, so shared prefixes need no map per request. After HiSparse, section
1.4 of its reference, in numpy; cost grows with the hot rows, never with the context.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_EMPTY = -1


@dataclass(frozen=True)
class Lookup:
    """Where the wanted rows lie, and what must be fetched before they are read."""

    device_rows: IntArray  # of each wanted row, in order
    missing_host_rows: IntArray  # unique
    missing_device_rows: IntArray  # where each missing row goes
    num_hits: int  # unique rows found


class HotRows:
    """The tables of one sequence over its leased device rows."""

    def __init__(
        self,
        num_groups: int,
        device_rows: IntArray,  # [hot_rows] the leased rows
    ) -> None:
        self._device_rows = device_rows
        self._keys = np.full((num_groups, len(device_rows)), _EMPTY, np.int64)
        self._last_used = np.zeros((num_groups, len(device_rows)), np.int64)
        self._tick = 0

    def look_up(
        self,
        group_idx: int,
        wanted: IntArray,  # [n] host rows, repeats allowed
        scratch: npt.NDArray[np.int32],  # [num_host_rows], all _EMPTY before and after
    ) -> Lookup:
        """Slots for all wanted rows at once; what is missing takes the least recently used slots.

        No wanted row is a victim: the union of wanted rows must fit the hot rows (RuntimeError).
        """
        keys, last_used = self._keys[group_idx], self._last_used[group_idx]
        self._tick += 1
        unique, places = _unique(wanted, scratch)
        if len(unique) > len(keys):
            raise RuntimeError(f"{len(unique)} rows selected at once, {len(keys)} hot rows")
        slots = _slots_of(unique, keys, scratch)
        is_hit = slots != _EMPTY
        last_used[slots[is_hit]] = self._tick
        missing = unique[~is_hit]
        if len(missing):
            # Hits carry this tick, so the oldest slots hold none of them.
            victims = np.argpartition(last_used, len(missing) - 1)[: len(missing)]
            keys[victims] = missing
            last_used[victims] = self._tick
            slots[~is_hit] = victims
        device_rows = self._device_rows[slots]
        return Lookup(
            device_rows[places], missing, device_rows[~is_hit], len(unique) - len(missing)
        )

    def forget(self, host_rows: IntArray) -> None:
        """These rows are rewritten: their copies here are stale."""
        stale = np.isin(self._keys, host_rows)
        self._keys[stale] = _EMPTY
        self._last_used[stale] = 0


def _unique(wanted: IntArray, scratch: npt.NDArray[np.int32]) -> tuple[IntArray, IntArray]:
    """The distinct rows, and each wanted row's place among them; in linear time, unsorted."""
    scratch[wanted] = np.arange(len(wanted), dtype=np.int32)
    representative = scratch[wanted]
    scratch[wanted] = _EMPTY
    is_first = representative == np.arange(len(wanted), dtype=np.int32)
    rank = np.cumsum(is_first) - 1
    return wanted[is_first], rank[representative]


def _slots_of(unique: IntArray, keys: IntArray, scratch: npt.NDArray[np.int32]) -> IntArray:
    taken = np.flatnonzero(keys != _EMPTY)
    scratch[keys[taken]] = taken
    slots = scratch[unique].astype(np.int64)
    scratch[keys[taken]] = _EMPTY
    return slots
