"""KV of one decode step: one new row per sequence, read back through the tiers.

Implements KvStep. Knows which rows are written and selected; where a row lies is the host tier's
business. A sequence's result does not depend on the others in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.engine.attention import (
    attend_gathered,
    attention_tiles,
    best_positions,
    index_scores,
)
from shared.engine.kv.fetch_plan import FetchPlan
from shared.engine.kv.format import KvFormat, page_geometry
from shared.engine.kv.host_tier import HostTier, TieredSequence
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.tier_pools import WriteSlots
from shared.engine.model.config import ModelConfig
from shared.engine.model.layers import NewKv, Queries


@dataclass(frozen=True)
class QueryRow:
    """One row of a step: a sequence's newest token."""

    sequence: TieredSequence
    position: int


class DecodeKv:
    """KvStep of one pass over a batch; the tier was prepared for its rows."""

    def __init__(
        self,
        rows: Sequence[QueryRow],
        tier: HostTier,
        kv_format: KvFormat,
        config: ModelConfig,
        *,
        first_position: int = 0,  # 1 in the MTP pass: position 0 has no token before it
    ) -> None:
        self._rows = rows
        self._tier = tier
        self._format = kv_format
        self._attention = config.attention
        self._first_position = first_position
        self._geometry = page_geometry(kv_format)
        self._index_ordinal = {layer: i for i, layer in enumerate(config.index_layers)}
        self._group_of = {
            layer: number for number, group in enumerate(tier.groups) for layer in group.layers
        }
        slots = [tier.write_slots(row.sequence, row.position, row.position + 1) for row in rows]
        self._slots = _join(slots)
        self._positions = torch.tensor([row.position for row in rows])
        self._row_ids = torch.empty(0)  # [n, width] int64 of the current group, -1 = none
        self._tiles: list[tuple[slice, int]] = []
        self._plans: list[FetchPlan] = []

    def write(self, layer: int, new: NewKv) -> None:
        """See KvStep."""
        pools = self._tier.pools
        pools.write(layer, self._slots, self._format.encode_rows(new.latent))
        if new.index_key is not None:
            pages = pools.index_pages[self._index_ordinal[layer]]
            records = self._format.encode_keys(new.index_key)
            self._geometry.write(pages, self._slots.host_rows, records)

    def attend(self, layer: int, queries: Queries) -> torch.Tensor:
        """See KvStep."""
        if queries.index_query is not None:
            self._resolve(layer, queries)
        for plan in self._plans:
            plan.fetch(layer)
        config, rows = self._attention, self._tier.pools.device_rows[layer]
        out = queries.query.new_empty((*queries.query.shape[:2], config.kv_lora_rank))
        for part, width in self._tiles:
            places = self._row_ids[part, :width]
            stored = rows.index_select(0, places.clamp_min(0).flatten())
            gathered = self._format.decode_rows(stored).unflatten(0, places.shape)
            out[part] = attend_gathered(
                queries.query[part], gathered, places >= 0, config.kv_lora_rank, config.scale
            )
        return out

    def _resolve(self, layer: int, queries: Queries) -> None:
        group = self._group_of[layer]
        chosen = self._choose(layer, queries)
        resolved = [
            self._tier.resolve(row.sequence, group, chosen[number : number + 1])
            for number, row in enumerate(self._rows)
        ]
        self._row_ids = torch.cat([rows.row_ids for rows in resolved])
        self._tiles = attention_tiles(self._row_ids)
        self._plans = [rows.plan for rows in resolved]

    def _choose(self, layer: int, queries: Queries) -> torch.Tensor:  # [n, width] int64, -1 = none
        """Each row's positions: all of them while they are at most top-k, else the best."""
        longest = max(row.position for row in self._rows) + 1
        width = self._attention.index_topk
        places = torch.arange(self._first_position, self._first_position + width)
        chosen = torch.where(places <= self._positions[:, None], places, -1)
        long = [n for n, row in enumerate(self._rows) if self._has_choice(row)]
        if long:
            scores = torch.full((len(long), longest), -torch.inf)
            for place, number in enumerate(long):
                self._score(layer, number, queries, scores[place])
            chosen[long] = best_positions(
                scores, self._positions[long], self._first_position, width
            )
        return chosen

    def _has_choice(self, row: QueryRow) -> bool:
        return row.position + 1 - self._first_position > self._attention.index_topk

    def _score(self, layer: int, number: int, queries: Queries, out: torch.Tensor) -> None:
        """Scores of one row's keys into the beginning of `out`."""
        assert queries.index_query is not None and queries.index_weights is not None
        row = self._rows[number]
        num_keys = row.position + 1
        blocks = torch.from_numpy(row.sequence.blocks[: -(-num_keys // BLOCK_TOKENS)])
        pages = self._tier.pools.index_pages[self._index_ordinal[layer]].index_select(0, blocks)
        # Whole pages: what lies behind the last key is nobody's score.
        keys = self._format.decode_keys(self._geometry.records(pages))
        one = slice(number, number + 1)
        query = self._format.round_query(queries.index_query[one])
        buffer = query.new_empty(query.shape[1] * len(keys))
        scores = index_scores(query, queries.index_weights[one], keys, buffer)
        out[:num_keys] = scores[0, :num_keys]


def _join(slots: Sequence[WriteSlots]) -> WriteSlots:
    """The batch's write slots as one, each sequence having one row."""
    host_rows = torch.cat([s.host_rows for s in slots])
    device_rows = torch.cat([s.device_rows for s in slots])
    if all(s.mirrored is None for s in slots):
        return WriteSlots(host_rows, device_rows, None)
    mirrored = [number for number, s in enumerate(slots) if len(s.device_rows)]
    return WriteSlots(host_rows, device_rows, torch.tensor(mirrored, dtype=torch.int64))
