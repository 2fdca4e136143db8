"""KV of one prefill step on one rank: queries split by token, KV split by token.

Implements KvStep. New rows are gathered from all ranks as encoded bytes (656, not 1,152 a row) and
each rank keeps its own; the cached context is gathered into a temporary full copy per layer, used,
and dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.attention import select_positions, sparse_attention
from shared.engine.comm import RankGroup
from shared.engine.kv.format import KvFormat
from shared.engine.kv.layout import BLOCK_TOKENS, IntArray, QueryPlan, Sharding, plan_queries
from shared.engine.kv.pool import BlockPool
from shared.engine.model.config import AttentionConfig
from shared.engine.model.layers import Projected
from shared.engine.model.transformer import StepRows
from shared.engine.step import Chunk

Select = Callable[..., torch.Tensor]  # select_positions, or a test's injected choice


@dataclass(frozen=True)
class ChunkRows:
    """One chunk as this rank sees it."""

    chunk: Chunk
    step_tokens: slice  # the chunk's tokens among the step's
    local: torch.Tensor  # [own] int64: this rank's rows of the chunk
    positions: torch.Tensor  # [own] int64: their positions
    kept_tokens: torch.Tensor  # [kept] int64: step tokens whose KV this rank keeps
    kept_slots: torch.Tensor  # [kept] int64: where
    cached_blocks: torch.Tensor  # [blocks] int64 that hold the cached context
    cached_order: torch.Tensor  # [num_cached] int64: its rows in the rank-major gathered pages


class StepLayout:
    """A step's row bookkeeping on one rank, derived from lengths and block ids alone."""

    def __init__(self, chunks: Sequence[Chunk], sharding: Sharding, rank: int) -> None:
        self.plan: QueryPlan = plan_queries([len(c.token_ids) for c in chunks], sharding.size)
        local_tokens = self.plan.local_tokens[rank]
        self.local_tokens = torch.from_numpy(local_tokens)
        self.chunks: list[ChunkRows] = []
        begin = 0
        for chunk in chunks:
            self.chunks.append(_chunk_rows(chunk, begin, local_tokens, sharding, rank))
            begin += len(chunk.token_ids)
        self.positions = torch.from_numpy(
            np.concatenate([np.arange(c.first, c.end, dtype=np.int64) for c in chunks])
        )
        self.token_ids = torch.from_numpy(
            np.concatenate([c.token_ids.astype(np.int64) for c in chunks])
        )

    def rows(self, position_offset: int) -> StepRows:
        """The rank's rows, rotary positions shifted by `position_offset` and floored at 0."""
        positions = self.positions[self.local_tokens] + position_offset
        return StepRows(positions.clamp_min(0), self.plan.num_replicated, self.plan.padded_len)

    def restore(
        self,
        local: torch.Tensor,  # [local rows, ...]
        group: RankGroup,
    ) -> torch.Tensor:  # [num_tokens, ...] in step order, equal on all ranks
        """All ranks' rows in the step's order. Collective."""
        plan = self.plan
        if not plan.padded_len:
            return local  # replicated rows are in step order already
        own = local[plan.num_replicated :]
        padded = local.new_zeros((plan.padded_len, *local.shape[1:]))
        padded[: own.shape[0]] = own
        joined = torch.cat((local[: plan.num_replicated], group.all_gather(padded)))
        return joined[torch.from_numpy(plan.restore)]


def _chunk_rows(
    chunk: Chunk,
    begin: int,
    local_tokens: IntArray,
    sharding: Sharding,
    rank: int,
) -> ChunkRows:
    end = begin + len(chunk.token_ids)
    local = np.flatnonzero((local_tokens >= begin) & (local_tokens < end))
    new = np.arange(chunk.num_cached, chunk.end, dtype=np.int64)
    kept = new[sharding.owner(new) == rank]
    row = sharding.local_row(kept)
    blocks = np.asarray(chunk.block_ids, np.int64)
    num_cached_blocks = -(-chunk.num_cached // sharding.effective_block_tokens)
    cached = np.arange(chunk.num_cached, dtype=np.int64)
    return ChunkRows(
        chunk=chunk,
        step_tokens=slice(begin, end),
        local=torch.from_numpy(local),
        positions=torch.from_numpy(local_tokens[local] - begin + chunk.first),
        kept_tokens=torch.from_numpy(kept - chunk.first + begin),
        kept_slots=torch.from_numpy(
            blocks[row // BLOCK_TOKENS] * BLOCK_TOKENS + row % BLOCK_TOKENS
        ),
        cached_blocks=torch.from_numpy(blocks[:num_cached_blocks]),
        cached_order=torch.from_numpy(
            sharding.gathered_row(cached, num_cached_blocks * BLOCK_TOKENS)
        ),
    )


@dataclass(frozen=True)
class KvContext:
    """What every pass of every step needs."""

    pool: BlockPool
    kv_format: KvFormat
    attention: AttentionConfig
    sharding: Sharding
    group: RankGroup
    select: Select = select_positions


class PrefillKv:
    """KvStep of one pass over a step's rows."""

    def __init__(
        self,
        layout: StepLayout,
        context: KvContext,
        *,
        first_position: int = 0,  # 1 in the MTP pass: position 0 has no token before it
    ) -> None:
        self._layout = layout
        self._pool = context.pool
        self._format = context.kv_format
        self._attention = context.attention
        self._group = context.group
        self._select = context.select
        self._first_position = first_position
        self._new_rows = torch.empty(0)
        self._new_keys = torch.empty(0)
        self._chosen: list[torch.Tensor] = []

    def write(self, layer: int, projected: Projected) -> None:
        """See KvStep. Collective."""
        rows = self._format.encode_rows(projected.latent)
        self._new_rows = self._layout.restore(rows, self._group)
        for rows_of in self._layout.chunks:
            self._pool.write_rows(layer, rows_of.kept_slots, self._new_rows[rows_of.kept_tokens])
        if projected.index_key is None:
            return
        keys = self._format.encode_keys(projected.index_key)
        self._new_keys = self._layout.restore(keys, self._group)
        for rows_of in self._layout.chunks:
            self._pool.write_keys(layer, rows_of.kept_slots, self._new_keys[rows_of.kept_tokens])

    def attend(self, layer: int, projected: Projected) -> torch.Tensor:
        """See KvStep. Collective."""
        config = self._attention
        if projected.index_query is not None:
            self._chosen = [
                self._choose(layer, rows_of, projected) for rows_of in self._layout.chunks
            ]
        out = projected.query.new_zeros((*projected.query.shape[:2], config.kv_lora_rank))
        for rows_of, chosen in zip(self._layout.chunks, self._chosen, strict=True):
            cached = self._pool.read_rows(layer, rows_of.cached_blocks)
            context = self._format.decode_rows(self._context(rows_of, cached, self._new_rows))
            out[rows_of.local] = sparse_attention(
                projected.query[rows_of.local], context, chosen, config.kv_lora_rank, config.scale
            )
        return out

    def _choose(self, layer: int, rows_of: ChunkRows, projected: Projected) -> torch.Tensor:
        assert projected.index_query is not None and projected.index_weights is not None
        cached = self._pool.read_keys(layer, rows_of.cached_blocks)
        records = self._context(rows_of, cached, self._new_keys)
        return self._select(
            self._format.round_query(projected.index_query[rows_of.local]),
            projected.index_weights[rows_of.local],
            self._format.decode_keys(records),
            rows_of.positions,
            self._first_position,
            self._attention.index_topk,
        )

    def _context(
        self,
        rows_of: ChunkRows,
        cached: torch.Tensor,  # [blocks * 64, bytes] this rank's pages of the cached context
        new: torch.Tensor,  # [num_tokens, bytes] the step's rows
    ) -> torch.Tensor:  # [chunk.end, bytes] the whole sequence so far, in position order
        """Cached rows of all ranks, then the chunk's new ones. Collective."""
        fresh = new[rows_of.step_tokens][rows_of.chunk.num_recomputed :]
        if not rows_of.chunk.num_cached:
            return fresh
        if self._group.size == 1:
            return torch.cat((cached[: rows_of.chunk.num_cached], fresh))
        gathered = self._group.all_gather(cached)
        return torch.cat((gathered[rows_of.cached_order], fresh))
