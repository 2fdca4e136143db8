"""Which pages of every sequence lie on the device, decided anew between steps.

Knows pages, no rows: where a selected row is found is the tier's business. `host_tier` builds on it
on a CPU and `gpu/tier` on a GPU.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from shared.block_hash import BLOCK_TOKENS
from shared.engine.kv.device_pages import DevicePages, IntArray
from shared.engine.kv.residency import TAIL_PAGES, ResidencyPolicy

PageFetch = Callable[[IntArray, IntArray], None]  # copies host pages to device pages, all layers


class PagedSequence:
    """One sequence's blocks, and which of them it uses. Changed by PageResidency only."""

    def __init__(self, block_ids: Sequence[int], sentinel: int) -> None:
        self.blocks = np.array([*block_ids, sentinel], np.int64)  # the sentinel serves position -1
        self.is_whole = False
        self.num_seen = 0  # leading blocks that are in use
        self.tail_start = 0
        self.last_step = 0
        self.checked_drops = -1  # the drop count at which all seen blocks were last looked at
        self.lease: list[int] = []  # device pages for hot rows; taken once, kept to the end

    @property
    def seen(self) -> IntArray:
        """The blocks in use."""
        return self.blocks[: self.num_seen]

    @property
    def leased_rows(self) -> IntArray:
        """The device rows of the leased pages."""
        first_rows = np.array(self.lease, np.int64) * BLOCK_TOKENS
        return (first_rows[:, None] + np.arange(BLOCK_TOKENS)).ravel()


_Sequence = TypeVar("_Sequence", bound=PagedSequence)


@dataclass(frozen=True)
class StepRange(Generic[_Sequence]):
    """The positions one sequence writes in the coming step."""

    sequence: _Sequence
    first: int
    end: int


class PageResidency(Generic[_Sequence]):
    """All sequences' pages on one device. Owned by the step thread."""

    def __init__(
        self, num_host_pages: int, num_device_pages: int, policy: ResidencyPolicy, fetch: PageFetch
    ) -> None:
        self.num_host_pages = num_host_pages
        self.pages = DevicePages(num_host_pages, num_device_pages)
        self._policy = policy
        self._fetch = fetch
        self._wanted: dict[int, int] = {}  # device page to the host page it will hold
        self._sequences: dict[_Sequence, None] = {}
        self._step = 0

    @property
    def num_open(self) -> int:
        """Sequences between open and close."""
        return len(self._sequences)

    def open(self, sequence: _Sequence, num_shared_blocks: int) -> None:
        """Begin it; the first num_shared_blocks are prefix hits, the others hold nothing yet."""
        sequence.is_whole = self._policy.is_whole(len(sequence.blocks) - 1)
        self.pages.hold(sequence.blocks[:-1], num_shared_blocks)
        self._sequences[sequence] = None

    def close(self, sequence: _Sequence) -> None:
        """End it in any state. Its blocks stay readable for prefix hits."""
        del self._sequences[sequence]
        self.pages.release_need(sequence.blocks[sequence.tail_start : sequence.num_seen])
        self.pages.let_go(sequence.blocks[:-1])
        self.pages.give_back(sequence.lease)

    def prepare(self, batch: Sequence[StepRange[_Sequence]]) -> None:
        """Pages to write to and, for a sequence that is not wholly resident, its lease.

        Rows found before are void afterwards.
        """
        self._step += 1
        fresh = [self._extend(step) for step in batch]
        for step in batch:
            self._bring_needed(step)
        for blocks in fresh:
            self._bring_while_roomy(blocks)
        self.pages.make_room(self._policy.min_free_pages, self._victims())
        while any([self._lease_if_cold(step.sequence) for step in batch]):
            pass  # a lease may unpin another sequence's pages; each sequence leases once
        if self._wanted:
            self._fetch(
                np.array([*self._wanted.values()], np.int64), np.array([*self._wanted], np.int64)
            )
            self._wanted.clear()

    def write_rows(
        self,
        blocks: IntArray,  # [n] that hold the positions
        positions: IntArray,  # [n]
    ) -> tuple[IntArray, IntArray]:  # host rows, device rows; a device row is negative for none
        """Where the rows of these positions go. RuntimeError if another sequence reads them too."""
        if self.pages.is_shared(blocks):
            raise RuntimeError("a block that several sequences hold cannot be rewritten")
        offsets = positions & 63
        return blocks * BLOCK_TOKENS + offsets, self.pages.first_rows[blocks] + offsets

    def check_integrity(self) -> None:
        """Every page is somebody's or free; AssertionError if not. For tests and idle moments."""
        self.pages.check_integrity([page for s in self._sequences for page in s.lease])

    def _extend(self, step: StepRange[_Sequence]) -> IntArray:
        """Take the step's blocks into use; the tail moves on. Returns the blocks that are new."""
        sequence = step.sequence
        sequence.last_step = self._step
        before, tail_before = sequence.num_seen, sequence.tail_start
        # Never back: rejected drafts shorten a sequence by less than a page.
        sequence.num_seen = max(before, -(-step.end // BLOCK_TOKENS))
        if not sequence.is_whole:
            sequence.tail_start = max(tail_before, sequence.num_seen - TAIL_PAGES)
        if sequence.num_seen > before:
            sequence.checked_drops = -1
        self.pages.release_need(sequence.blocks[tail_before:before])
        self.pages.need(sequence.blocks[sequence.tail_start : sequence.num_seen])
        return sequence.blocks[before : sequence.num_seen]

    def _bring_needed(self, step: StepRange[_Sequence]) -> None:
        sequence = step.sequence
        missing = self.pages.without_page(sequence.blocks[sequence.tail_start : sequence.num_seen])
        if not len(missing):
            return
        self.pages.make_room(len(missing), self._victims())
        # A block that begins in this step holds nothing worth copying.
        begun = set(sequence.blocks[: -(-step.first // BLOCK_TOKENS)].tolist())
        self._place(missing, begun)

    def _bring_while_roomy(self, blocks: IntArray) -> None:
        room = self.pages.num_free - self._policy.min_free_pages
        missing = self.pages.without_page(blocks)[: max(room, 0)]
        self._place(missing, missing.tolist())

    def _place(self, blocks: IntArray, filled: Iterable[int]) -> None:
        filled = set(filled)
        for block, page in zip(blocks.tolist(), self.pages.place(blocks), strict=True):
            # A page that changes hands within one step is fetched for its last holder only.
            self._wanted.pop(page, None)
            if block in filled:
                self._wanted[page] = block

    def _lease_if_cold(self, sequence: _Sequence) -> bool:
        if sequence.lease or sequence.checked_drops == self.pages.num_drops:
            return False
        sequence.checked_drops = self.pages.num_drops
        if not len(self.pages.without_page(sequence.seen)):
            return False
        self.pages.make_room(self._policy.hot_pages, self._victims())
        sequence.lease = self.pages.take(self._policy.hot_pages)
        for page in sequence.lease:
            self._wanted.pop(page, None)
        return True

    def _victims(self) -> list[IntArray]:
        """Blocks in use, the least recently used sequence's first."""
        return [s.seen for s in sorted(self._sequences, key=lambda s: s.last_step)]
