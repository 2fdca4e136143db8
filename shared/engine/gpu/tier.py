"""Hybrid HiSparse on a GPU: pages are decided on the host between steps, rows found on the device.

The twin of `HostTier`. Within a step the device alone resolves positions, renews hot rows and
counts; the host learns of it with the step's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.gpu.transfers import on_device, sent
from shared.engine.kernels.host_gather import host_gather
from shared.engine.kernels.hot_tables import HotTables, MissPlan, make_scratch
from shared.engine.kv.fetch_plan import GroupCounters, IndexGroup
from shared.engine.kv.layout import BLOCK_TOKENS, IntArray
from shared.engine.kv.page_residency import PagedSequence, PageResidency, StepRange
from shared.engine.kv.residency import ResidencyPolicy
from shared.engine.kv.tier_pools import TierPools
from shared.errors import WorkerLost

_PAGE_PROGRAMS = 32  # between steps the whole device is free to copy pages


class GpuSequence(PagedSequence):
    """One sequence's place in the tiers. Made by GpuTier.open, changed by GpuTier only."""

    def __init__(self, block_ids: Sequence[int], sentinel: int, slot: int) -> None:
        super().__init__(block_ids, sentinel)
        self.slot = slot  # its row in the page table, and its lease's in the hot tables
        self.has_tables = False


@dataclass(frozen=True)
class Tables:
    """What kernels look pages and rows up in. All on the device, at fixed addresses."""

    blocks: torch.Tensor  # [max_sequences, num_host_pages] int32 block ids of each slot
    first_rows: torch.Tensor  # [num_host_pages] int64 each block's first device row, negative none
    hot: HotTables  # leases are slots
    scratch: torch.Tensor  # of resolve_rows
    # [groups, 4] int64 since start: entries read from resident pages, hot rows found, entries that
    # had neither page nor lease, rows fetched
    totals: torch.Tensor


class GpuTier:
    """All sequences' KV on one decode rank. Owned by the step thread."""

    def __init__(
        self,
        pools: TierPools,
        groups: Sequence[IndexGroup],
        policy: ResidencyPolicy,
        max_sequences: int,
    ) -> None:
        shape, device = pools.shape, pools.device_rows.device
        self.pools = pools
        self.groups = tuple(groups)
        self.counters = [GroupCounters() for _ in groups]
        self.max_sequences = max_sequences
        self.tables = Tables(
            torch.zeros((max_sequences, shape.num_host_pages), dtype=torch.int32, device=device),
            torch.full((shape.num_host_pages,), -1, dtype=torch.int64, device=device),
            HotTables.allocate(len(self.groups), max_sequences, policy.hot_pages, device),
            make_scratch(max_sequences, shape.num_host_pages, device),
            torch.zeros((len(self.groups), 4), dtype=torch.int64, device=device),
        )
        self._device = device
        self._residency: PageResidency[GpuSequence] = PageResidency(
            shape.num_host_pages, shape.num_device_pages, policy, self._fetch_pages
        )
        self._sent_first_rows = np.empty(0, np.int64)
        self._free_slots = [*range(max_sequences)]

    def open(self, block_ids: Sequence[int], num_shared_blocks: int = 0) -> GpuSequence:
        """See Tier. RuntimeError when more than max_sequences are open."""
        if not self._free_slots:
            raise RuntimeError(f"{self.max_sequences} sequences are open already")
        sequence = GpuSequence(block_ids, self._residency.num_host_pages, self._free_slots[-1])
        # What may fail comes first: nothing is taken then.
        with on_device(self._device):
            blocks = sent(sequence.blocks[:-1].astype(np.int32), self._device)
            self.tables.blocks[sequence.slot, : len(blocks)] = blocks
        self._residency.open(sequence, num_shared_blocks)
        self._free_slots.pop()
        return sequence

    def close(self, sequence: GpuSequence) -> None:
        """See Tier."""
        self._residency.close(sequence)
        self._free_slots.append(sequence.slot)

    def prepare(self, batch: Sequence[StepRange[GpuSequence]]) -> None:
        """Make the device ready for a step: pages to write to, hot rows to read through."""
        self._residency.prepare(batch)
        for sequence in (step.sequence for step in batch):
            if sequence.lease and not sequence.has_tables:
                pages = sent(np.array(sequence.lease, np.int32), self._device)
                self.tables.hot.begin(sequence.slot, pages)
                sequence.has_tables = True
        first_rows = self._residency.pages.first_rows[:-1]
        if not np.array_equal(first_rows, self._sent_first_rows):
            now = first_rows.copy()
            self.tables.first_rows.copy_(sent(now, self._device))
            self._sent_first_rows = now  # only what has been sent: a step may be repeated

    def write_rows(
        self, sequences: Sequence[GpuSequence], positions: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Each sequence's host row and device row of its position; the latter is -1 for none."""
        blocks = np.array(
            [
                sequence.blocks[position >> 6]
                for sequence, position in zip(sequences, positions.tolist(), strict=True)
            ]
        )
        host, device = self._residency.write_rows(blocks, positions)
        return host, np.maximum(device, -1)

    def count(self, totals: IntArray) -> None:
        """Take over what the device has counted. WorkerLost if it wanted rows that were nowhere."""
        for group, counters, (resident, hits, unplaced, misses) in zip(
            self.groups, self.counters, totals.tolist(), strict=True
        ):
            if unplaced:
                raise WorkerLost("rows outside the device were selected before prepare")
            counters.resident, counters.hits, counters.misses = resident, hits, misses
            counters.host_bytes = misses * len(group.layers) * self.pools.shape.row_bytes

    def check_integrity(self) -> None:
        """See Tier."""
        self._residency.check_integrity()
        taken = self.max_sequences - len(self._free_slots)
        assert taken == self._residency.num_open, "a slot was lost"

    def _fetch_pages(self, host_pages: IntArray, device_pages: IntArray) -> None:
        plan = _page_plan(host_pages, device_pages, self._device)
        for host, device in zip(self.pools.host_rows, self.pools.device_rows, strict=True):
            host_gather(host, device, plan, _PAGE_PROGRAMS)


def _page_plan(host_pages: IntArray, device_pages: IntArray, device: torch.device) -> MissPlan:
    """Whole pages as the rows of one request."""
    first_rows = np.stack((host_pages, device_pages))[:, None, :, None] * BLOCK_TOKENS
    rows = (first_rows + np.arange(BLOCK_TOKENS)).reshape(2, 1, -1).astype(np.int32)
    plan = sent(rows, device)
    return MissPlan(plan[0], plan[1], sent(np.array([rows.shape[2]], np.int32), device))
