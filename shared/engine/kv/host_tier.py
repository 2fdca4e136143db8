"""Hybrid HiSparse: decode keeps KV in host memory and a cache of it on the device.

A selected row is looked up as resident page, then hot row, then host; only placement changes, never
a result. Residency changes in `prepare`, between steps. Knows no model; design.md section 5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.block_hash import BLOCK_TOKENS
from shared.engine.kv.device_pages import DevicePages, IntArray
from shared.engine.kv.fetch_plan import FetchPlan, GroupCounters, IndexGroup, ResolvedRows
from shared.engine.kv.hot_rows import HotRows
from shared.engine.kv.residency import TAIL_PAGES, ResidencyPolicy
from shared.engine.kv.tier_pools import TierPools, WriteSlots


class TieredSequence:
    """One sequence's place in the tiers. Made by HostTier.open, changed by HostTier only."""

    def __init__(self, block_ids: Sequence[int], sentinel: int, *, is_whole: bool) -> None:
        self.blocks = np.array([*block_ids, sentinel], np.int64)  # the sentinel serves position -1
        self.is_whole = is_whole
        self.num_seen = 0  # leading blocks that are in use
        self.tail_start = 0
        self.last_step = 0
        self.checked_drops = -1  # the drop count at which all seen blocks were last looked at
        self.lease: list[int] = []
        self.hot: HotRows | None = None
        self.was_cold = np.zeros(len(self.blocks), np.bool_)  # blocks some rows of which went hot
        self.plans: dict[int, FetchPlan] = {}  # the last one of each group that read hot rows
        self.is_exact = True  # False once a missing row was not fetched on purpose

    @property
    def seen(self) -> IntArray:
        """The blocks in use."""
        return self.blocks[: self.num_seen]


@dataclass(frozen=True)
class StepRange:
    """The positions one sequence writes in the coming step."""

    sequence: TieredSequence
    first: int
    end: int


class HostTier:
    """All sequences' KV on one decode rank. Owned by the step thread."""

    def __init__(
        self,
        pools: TierPools,
        groups: Sequence[IndexGroup],
        policy: ResidencyPolicy,
        *,
        moves_bytes: bool = True,
    ) -> None:
        """`moves_bytes=False` walks all plans without copying, to measure what host reads cost.

        Rows are then wrong, so `confirm` refuses every sequence that missed one.
        """
        self.pools = pools
        self.groups = tuple(groups)
        self.counters = [GroupCounters() for _ in groups]
        self._policy = policy
        self._moves_bytes = moves_bytes
        self._num_host_pages = pools.shape.num_host_pages
        self._pages = DevicePages(self._num_host_pages, pools.shape.num_device_pages)
        self._sequences: dict[TieredSequence, None] = {}
        self._scratch = np.full(self._num_host_pages * BLOCK_TOKENS, -1, np.int32)
        self._step = 0

    @property
    def num_free_device_pages(self) -> int:
        """Pages that hold nothing; more can be had by unpinning."""
        return self._pages.num_free

    def open(self, block_ids: Sequence[int], num_shared_blocks: int = 0) -> TieredSequence:
        """Begin a sequence on all its reserved blocks; the first num_shared_blocks are prefix hits.

        The other blocks' old content is forgotten here, before anything is written to them.
        """
        is_whole = self._policy.is_whole(len(block_ids))
        sequence = TieredSequence(block_ids, self._num_host_pages, is_whole=is_whole)
        self._pages.hold(sequence.blocks[:-1], num_shared_blocks)
        self._sequences[sequence] = None
        return sequence

    def close(self, sequence: TieredSequence) -> None:
        """End it in any state. Its blocks stay readable for prefix hits."""
        del self._sequences[sequence]
        self._pages.release_need(sequence.blocks[sequence.tail_start : sequence.num_seen])
        self._pages.let_go(sequence.blocks[:-1])
        self._pages.give_back(sequence.lease)

    def prepare(self, batch: Sequence[StepRange]) -> None:
        """Make the device ready for a step: pages to write to, hot rows to read through.

        Row ids resolved before are void afterwards.
        """
        self._step += 1
        fresh = [self._extend(step) for step in batch]
        for step in batch:
            self._bring_needed(step)
        for blocks in fresh:
            self._bring_while_roomy(blocks)
        self._pages.make_room(self._policy.min_free_pages, self._victims())
        while any([self._lease_if_cold(step.sequence) for step in batch]):
            pass  # a lease may unpin another sequence's pages; each sequence leases once

    def write_slots(self, sequence: TieredSequence, first: int, end: int) -> WriteSlots:
        """Where rows of positions first..end-1 go; hot copies of their old rows are forgotten."""
        positions = np.arange(first, end, dtype=np.int64)
        blocks = sequence.blocks[positions >> 6]
        if self._pages.is_shared(blocks):
            raise RuntimeError("a block that several sequences hold cannot be rewritten")
        offsets = positions & 63
        host_rows = blocks * BLOCK_TOKENS + offsets
        if sequence.hot is not None and sequence.was_cold[positions >> 6].any():
            sequence.hot.forget(host_rows)
        device_rows = self._pages.first_rows[blocks] + offsets
        resident = np.flatnonzero(device_rows >= 0)
        return WriteSlots(
            torch.from_numpy(host_rows),
            torch.from_numpy(device_rows[resident]),
            None if len(resident) == len(positions) else torch.from_numpy(resident),
        )

    def resolve(
        self,
        sequence: TieredSequence,
        group_idx: int,
        positions: torch.Tensor,  # [num_queries, width] int64, -1 = none
    ) -> ResolvedRows:
        """Device rows for the union of all queries' selections, for all layers of the group.

        The group's owner resolves; then every layer of the group fetches the plan before it reads.
        """
        counters = self.counters[group_idx]
        selected = positions.numpy()
        row_ids = self._pages.first_rows[sequence.blocks[selected >> 6]] + (selected & 63)
        if row_ids.min(initial=-1) >= -1:
            counters.resident += int(np.count_nonzero(row_ids >= 0))
            return ResolvedRows(torch.from_numpy(row_ids), self._plan(group_idx, _NONE, _NONE))
        if sequence.hot is None:
            raise RuntimeError("rows outside the device were selected before prepare")
        before = sequence.plans.get(group_idx)
        if before is not None and self._moves_bytes and not before.is_complete:
            raise RuntimeError(f"a layer of group {group_idx} has not fetched its last plan")
        is_cold = row_ids < -1
        cold = selected[is_cold]
        sequence.was_cold[cold >> 6] = True
        wanted = sequence.blocks[cold >> 6] * BLOCK_TOKENS + (cold & 63)
        found = sequence.hot.look_up(group_idx, wanted, self._scratch)
        counters.resident += int(np.count_nonzero(row_ids >= 0))
        counters.hits += found.num_hits
        counters.misses += len(found.missing_host_rows)
        row_ids[is_cold] = found.device_rows
        plan = self._plan(group_idx, found.missing_host_rows, found.missing_device_rows)
        sequence.plans[group_idx] = plan
        sequence.is_exact &= self._moves_bytes or plan.is_complete
        return ResolvedRows(torch.from_numpy(row_ids), plan)

    def confirm(self, sequence: TieredSequence) -> None:
        """RuntimeError unless every row read had been fetched; call it before tokens leave."""
        if not sequence.is_exact:
            raise RuntimeError("host rows were not fetched: this worker only measures")
        for group_idx, plan in sequence.plans.items():
            if not plan.is_complete:
                raise RuntimeError(f"rows of group {group_idx} were read but not fetched")

    def check_integrity(self) -> None:
        """Pools are whole; AssertionError if not. For tests and idle moments."""
        self._pages.check_integrity([page for s in self._sequences for page in s.lease])
        assert np.all(self._scratch == -1)

    def _plan(self, group_idx: int, host_rows: IntArray, device_rows: IntArray) -> FetchPlan:
        return FetchPlan(
            self.pools,
            self.groups[group_idx],
            self.counters[group_idx],
            torch.from_numpy(host_rows),
            torch.from_numpy(device_rows),
            moves_bytes=self._moves_bytes,
        )

    def _extend(self, step: StepRange) -> IntArray:
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
        self._pages.release_need(sequence.blocks[tail_before:before])
        self._pages.need(sequence.blocks[sequence.tail_start : sequence.num_seen])
        return sequence.blocks[before : sequence.num_seen]

    def _bring_needed(self, step: StepRange) -> None:
        sequence = step.sequence
        missing = self._pages.without_page(sequence.blocks[sequence.tail_start : sequence.num_seen])
        if not len(missing):
            return
        self._pages.make_room(len(missing), self._victims())
        # A block that begins in this step holds nothing worth copying.
        begun = set(sequence.blocks[: -(-step.first // BLOCK_TOKENS)].tolist())
        self._place(missing, begun)

    def _bring_while_roomy(self, blocks: IntArray) -> None:
        room = self._pages.num_free - self._policy.min_free_pages
        missing = self._pages.without_page(blocks)[: max(room, 0)]
        self._place(missing, missing.tolist())

    def _place(self, blocks: IntArray, filled: Iterable[int]) -> None:
        filled = set(filled)
        for block, page in zip(blocks.tolist(), self._pages.place(blocks), strict=True):
            if block in filled:
                self.pools.fetch_page(block, page)

    def _lease_if_cold(self, sequence: TieredSequence) -> bool:
        if sequence.hot is not None or sequence.checked_drops == self._pages.num_drops:
            return False
        sequence.checked_drops = self._pages.num_drops
        if not len(self._pages.without_page(sequence.seen)):
            return False
        self._pages.make_room(self._policy.hot_pages, self._victims())
        sequence.lease = self._pages.take(self._policy.hot_pages)
        first_rows = np.array(sequence.lease, np.int64) * BLOCK_TOKENS
        rows = (first_rows[:, None] + np.arange(BLOCK_TOKENS)).ravel()
        sequence.hot = HotRows(len(self.groups), rows)
        return True

    def _victims(self) -> list[IntArray]:
        """Blocks in use, the least recently used sequence's first."""
        return [s.seen for s in sorted(self._sequences, key=lambda s: s.last_step)]


_NONE = np.empty(0, np.int64)
