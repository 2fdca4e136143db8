"""Hybrid HiSparse: decode keeps KV in host memory and a cache of it on the device.

A selected row is looked up as resident page, then hot row, then host; only placement changes, never
a result. Residency changes in `prepare`, between steps. Knows no model; design.md section 5.
"""

from collections.abc import Sequence

import numpy as np
import torch

from shared.block_hash import BLOCK_TOKENS
from shared.engine.kv.device_pages import IntArray
from shared.engine.kv.fetch_plan import FetchPlan, GroupCounters, IndexGroup, ResolvedRows
from shared.engine.kv.hot_rows import HotRows
from shared.engine.kv.page_residency import PagedSequence, PageResidency, StepRange
from shared.engine.kv.residency import ResidencyPolicy
from shared.engine.kv.tier_pools import TierPools, WriteSlots


class TieredSequence(PagedSequence):
    """One sequence's place in the tiers. Made by HostTier.open, changed by HostTier only."""

    def __init__(self, block_ids: Sequence[int], sentinel: int) -> None:
        super().__init__(block_ids, sentinel)
        self.hot: HotRows | None = None
        self.was_cold = np.zeros(len(self.blocks), np.bool_)  # blocks some rows of which went hot
        self.plans: dict[int, FetchPlan] = {}  # the last one of each group that read hot rows
        self.is_exact = True  # False once a missing row was not fetched on purpose


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
        self._moves_bytes = moves_bytes
        shape = pools.shape
        self._residency: PageResidency[TieredSequence] = PageResidency(
            shape.num_host_pages, shape.num_device_pages, policy, pools.fetch_pages
        )
        self._scratch = np.full(shape.num_host_pages * BLOCK_TOKENS, -1, np.int32)

    @property
    def num_free_device_pages(self) -> int:
        """Pages that hold nothing; more can be had by unpinning."""
        return self._residency.pages.num_free

    def open(self, block_ids: Sequence[int], num_shared_blocks: int = 0) -> TieredSequence:
        """Begin a sequence on all its reserved blocks; the first num_shared_blocks are prefix hits.

        The other blocks' old content is forgotten here, before anything is written to them.
        """
        sequence = TieredSequence(block_ids, self._residency.num_host_pages)
        self._residency.open(sequence, num_shared_blocks)
        return sequence

    def close(self, sequence: TieredSequence) -> None:
        """End it in any state. Its blocks stay readable for prefix hits."""
        self._residency.close(sequence)

    def prepare(self, batch: Sequence[StepRange[TieredSequence]]) -> None:
        """Make the device ready for a step: pages to write to, hot rows to read through.

        Row ids resolved before are void afterwards.
        """
        self._residency.prepare(batch)
        for step in batch:
            if step.sequence.lease and step.sequence.hot is None:
                step.sequence.hot = HotRows(len(self.groups), step.sequence.leased_rows)

    def write_slots(self, sequence: TieredSequence, first: int, end: int) -> WriteSlots:
        """Where rows of positions first..end-1 go; hot copies of their old rows are forgotten."""
        positions = np.arange(first, end, dtype=np.int64)
        host_rows, device_rows = self._residency.write_rows(
            sequence.blocks[positions >> 6], positions
        )
        if sequence.hot is not None and sequence.was_cold[positions >> 6].any():
            sequence.hot.forget(host_rows)
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
        row_ids = self._residency.pages.first_rows[sequence.blocks[selected >> 6]] + (selected & 63)
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
        self._residency.check_integrity()
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


_NONE = np.empty(0, np.int64)
