"""KV of one decode step on a GPU: rows written, chosen, found and read by kernels alone.

Implements KvStep for one row a sequence. Every shape follows from the number of rows and of pages,
so the step can be captured; a row of padding has position -1, is written nowhere and reads nothing.
"""

from dataclasses import dataclass

import torch

from shared.engine.gpu.attention_ops import quantise_query
from shared.engine.gpu.tier import GpuTier
from shared.engine.kernels.forget_rows import forget_rows
from shared.engine.kernels.host_gather import host_gather
from shared.engine.kernels.hot_tables import BatchBlocks, MissPlan, Resolution
from shared.engine.kernels.insert_keys import insert_keys
from shared.engine.kernels.insert_rows import insert_rows
from shared.engine.kernels.paged_indexer import paged_indexer
from shared.engine.kernels.resolve_rows import resolve_rows
from shared.engine.kernels.sparse_mla_decode import sparse_mla_decode
from shared.engine.kernels.top_k import top_k
from shared.engine.kv.fetch_plan import IndexGroup
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.tier_pools import TierPools
from shared.engine.model.config import ModelConfig
from shared.engine.model.layers import NewKv, Queries

# Multiprocessors' worth of programs that read host rows: more do not fill the link better.
_GATHER_PROGRAMS = 16


@dataclass(frozen=True)
class StepPlaces:
    """Where a step's rows lie. [n] each, on the device."""

    positions: torch.Tensor  # int64, -1 = padding
    host_rows: torch.Tensor  # int64 where each is written, -1 = padding
    device_rows: torch.Tensor  # int64, -1 = not on the device
    slots: torch.Tensor  # int64 each sequence's slot
    leases: torch.Tensor  # int32 the slot of a sequence with hot rows, -1 = none


class Fetches:
    """Copies of a group's missing rows: the owner's at once, its followers' beside what the owner
    computes. The plan is one; a follower waits only if its own rows are not there yet.
    """

    def __init__(self, pools: TierPools) -> None:
        device = pools.device_rows.device
        self._pools = pools
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrivals: dict[int, torch.cuda.Event] = {}

    def start(self, group: IndexGroup, plan: MissPlan) -> None:
        """Every layer's copy. The plan may change once all layers have finished theirs."""
        if self._beside is None:
            for layer in group.layers:
                self._copy(layer, plan)
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            for layer in group.layers:
                self._copy(layer, plan)
                self._arrivals[layer] = torch.cuda.Event()
                self._arrivals[layer].record()

    def finish(self, layer: int) -> None:
        """What is launched from now on finds the layer's rows."""
        if self._beside is not None:
            self._arrivals.pop(layer).wait()

    def _copy(self, layer: int, plan: MissPlan) -> None:
        pools = self._pools
        host_gather(pools.host_rows[layer], pools.device_rows[layer], plan, _GATHER_PROGRAMS)


class GpuDecodeKv:
    """KvStep of one step; `begin` comes first, `end` last."""

    def __init__(
        self,
        places: StepPlaces,
        num_pages: int,
        tier: GpuTier,
        fetches: Fetches,
        config: ModelConfig,
    ) -> None:
        """`num_pages` is enough for every row's position."""
        self._places = places
        self._tier = tier
        self._attention = config.attention
        self._index_ordinal = {layer: i for i, layer in enumerate(config.index_layers)}
        self._group_of = {
            layer: number for number, group in enumerate(tier.groups) for layer in group.layers
        }
        num_rows, device = len(places.positions), places.positions.device
        self._limits = (places.positions + 1).int()
        self._blocks = BatchBlocks(
            tier.tables.blocks[:, :num_pages].index_select(0, places.slots),
            places.leases,
            tier.tables.first_rows,
        )
        found = Resolution.allocate(num_rows, 1, self._attention.index_topk, device)
        self._row_ids, self._plan = found.row_ids, found.plan
        shape = (len(tier.groups), num_rows)
        self._counts = torch.zeros((*shape, 3), dtype=torch.int32, device=device)
        self._num_misses = torch.zeros(shape, dtype=torch.int32, device=device)
        self._fetches = fetches

    def begin(self) -> None:
        """Hot copies of rows that are written again are stale."""
        host_rows = self._places.host_rows.int().unsqueeze(1)
        forget_rows(host_rows, self._places.leases, self._tier.tables.hot)

    def end(self) -> None:
        """Add up what the step has read."""
        counted = torch.cat((self._counts, self._num_misses.unsqueeze(2)), 2)
        self._tier.tables.totals.add_(counted.sum(1))

    def write(self, layer: int, new: NewKv) -> None:
        """See KvStep."""
        pools, places = self._tier.pools, self._places
        for rows, slots in (
            (pools.host_rows, places.host_rows),
            (pools.device_rows, places.device_rows),
        ):
            insert_rows(new.latent, slots, rows[layer].unflatten(0, (-1, BLOCK_TOKENS)))
        if new.index_key is not None:
            pages = pools.index_pages[self._index_ordinal[layer]]
            insert_keys(new.index_key, places.host_rows, pages)

    def attend(self, layer: int, queries: Queries) -> torch.Tensor:
        """See KvStep."""
        group, pools = self._group_of[layer], self._tier.pools
        found = self._found(group)
        if queries.index_query is not None:
            chosen = self._choose(layer, queries).unsqueeze(1)
            tables = self._tier.tables
            resolve_rows(chosen, self._blocks, tables.hot, group, tables.scratch, found)
            self._fetches.start(self._tier.groups[group], found.plan)
        self._fetches.finish(layer)
        out, _ = sparse_mla_decode(
            queries.query.contiguous(),
            pools.device_rows[layer],
            found.row_ids[:, 0],
            self._attention.scale,
        )
        return out

    def _found(self, group: int) -> Resolution:
        """One group at a time is resolved and read; what was counted of each is kept."""
        plan = MissPlan(self._plan.host_rows, self._plan.device_rows, self._num_misses[group])
        return Resolution(self._row_ids, plan, self._counts[group])

    def _choose(self, layer: int, queries: Queries) -> torch.Tensor:  # [n, top_k] int32, -1 = none
        """Each row's positions: all of them while they are at most top-k, else the best."""
        assert queries.index_query is not None and queries.index_weights is not None
        width, num_columns = self._attention.index_topk, self._blocks.page_table.shape[1] * 64
        if num_columns <= width:
            places = torch.arange(width, dtype=torch.int32, device=self._limits.device)
            return torch.where(places < self._limits.unsqueeze(1), places, -1)
        query, weights = quantise_query(queries.index_query, queries.index_weights)
        scores = weights.new_empty((len(query), 1, num_columns))
        pages = self._tier.pools.index_pages[self._index_ordinal[layer]]
        paged_indexer(
            query.unsqueeze(1),
            weights.unsqueeze(1),
            pages,
            self._blocks.page_table,
            self._limits.unsqueeze(1),
            scores,
        )
        return top_k(scores[:, 0], self._limits, width)
