"""Device pages: which block has one, which must keep it, and which goes first under pressure.

One free list serves resident pages and hot rows. Pages are clean copies of host pages, so unpinning
moves no bytes. Changes happen between steps only: row ids stay true for a whole step.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shared.block_hash import BLOCK_TOKENS

IntArray = npt.NDArray[np.int64]

# First row of a block without a page: stays negative, and below -1, for every offset in the block.
NOT_RESIDENT = -(1 << 40)


class DevicePages:
    """The device's page table and free list. Written by the step thread only."""

    def __init__(self, num_host_pages: int, num_device_pages: int) -> None:
        self.num_pages = num_device_pages
        # The last entry serves position -1: (-1 >> 6) finds it, and -64 + (-1 & 63) is -1 again.
        self.first_rows = np.full(num_host_pages + 1, NOT_RESIDENT, np.int64)
        self.first_rows[-1] = -BLOCK_TOKENS
        self.num_drops = 0
        self._free = list(range(num_device_pages))
        self._needed = np.zeros(num_host_pages, np.int64)  # how many sequences insist on each block
        self._holders = np.zeros(num_host_pages, np.int64)
        self._unheld: OrderedDict[int, None] = (
            OrderedDict()
        )  # resident, of no sequence; oldest first

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    def hold(self, blocks: IntArray, num_shared: int) -> None:
        """A sequence begins to use these blocks; all but the first num_shared hold nothing yet."""
        if np.any(self._holders[blocks[num_shared:]]):
            raise RuntimeError("a block was handed out anew while a sequence holds it")
        self._holders[blocks] += 1
        for block in blocks.tolist():
            self._unheld.pop(block, None)
        self._drop(self._resident(blocks[num_shared:]))

    def let_go(self, blocks: IntArray) -> None:
        """A sequence ends. Its pages stay until their room is needed, tail first."""
        self._holders[blocks] -= 1
        idle = self._resident(blocks[self._holders[blocks] == 0])
        self._unheld.update((block, None) for block in reversed(idle.tolist()))

    def is_shared(self, blocks: IntArray) -> bool:
        """Whether another sequence holds one of these blocks too."""
        return bool(np.any(self._holders[blocks] > 1))

    def need(self, blocks: IntArray) -> None:
        """A sequence insists on these blocks."""
        self._needed[blocks] += 1

    def release_need(self, blocks: IntArray) -> None:
        """A sequence no longer insists on them."""
        self._needed[blocks] -= 1

    def without_page(self, blocks: IntArray) -> IntArray:
        """Those of the blocks that are not resident, in order."""
        return blocks[self.first_rows[blocks] < 0]

    def take(self, num_pages: int) -> list[int]:
        """Pages from the free list. RuntimeError if admission promised more than there is."""
        if num_pages > len(self._free):
            raise RuntimeError(f"{num_pages} device pages needed, {len(self._free)} free")
        return [self._free.pop() for _ in range(num_pages)]

    def give_back(self, pages: Iterable[int]) -> None:
        """Leased pages return."""
        self._free.extend(pages)

    def place(self, blocks: IntArray) -> list[int]:
        """Pages for blocks that have none; the caller fills them."""
        pages = self.take(len(blocks))
        self.first_rows[blocks] = np.array(pages, np.int64) * BLOCK_TOKENS
        return pages

    def make_room(self, num_pages: int, victims: Sequence[IntArray]) -> None:
        """Unpin until num_pages are free or nothing is left to unpin.

        First blocks of no sequence, then the victims' blocks: one sequence after another, its tail
        first, needed ones never.
        """
        while self._unheld and len(self._free) < num_pages:
            self._drop(np.array([self._unheld.popitem(last=False)[0]], np.int64))
        for blocks in victims:
            missing = num_pages - len(self._free)
            if missing <= 0:
                return
            droppable = self._resident(blocks[self._needed[blocks] == 0])
            self._drop(droppable[::-1][:missing])

    def check_integrity(self, leased: Sequence[int]) -> None:
        """Every page is free, leased or one block's; AssertionError if not."""
        blocks = np.flatnonzero(self.first_rows[:-1] >= 0)
        resident = (self.first_rows[blocks] // BLOCK_TOKENS).tolist()
        assert sorted([*self._free, *leased, *resident]) == list(range(self.num_pages))
        assert {int(b) for b in blocks if self._holders[b] == 0} == set(self._unheld)
        assert np.all(self._needed >= 0) and np.all(self._needed <= self._holders)
        assert np.all(self.first_rows[:-1][self._needed > 0] >= 0), "a needed page was unpinned"

    def _resident(self, blocks: IntArray) -> IntArray:
        return blocks[self.first_rows[blocks] >= 0]

    def _drop(self, blocks: IntArray) -> None:
        if not len(blocks):
            return
        self._free.extend((self.first_rows[blocks] // BLOCK_TOKENS).tolist())
        self.first_rows[blocks] = NOT_RESIDENT
        self.num_drops += 1
