"""KV of one prefill step on one rank: queries split by token, KV split by token.

Implements KvStep. New rows are gathered from all ranks as encoded bytes (656, not 1,152 a row) and
each rank keeps its own; the cached context is gathered into a temporary full copy per layer, used,
and dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from shared.engine.attention_ops import AttentionOps
from shared.engine.comm import RankGroup
from shared.engine.kv.layout import BLOCK_TOKENS, IntArray, QueryPlan, Sharding, plan_queries
from shared.engine.kv.pool import BlockPool
from shared.engine.model.layers import NewKv, Queries
from shared.engine.model.transformer import StepRows
from shared.engine.step import Chunk

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ChunkRows:
    """One chunk as this rank sees it."""

    chunk: Chunk
    step_tokens: slice  # the chunk's tokens among the step's
    local: slice  # this rank's rows of the chunk: always adjacent
    positions: torch.Tensor  # [own] int64: their positions
    kept_tokens: torch.Tensor  # [kept] int64: step tokens whose KV this rank keeps
    kept_slots: torch.Tensor  # [kept] int64: where
    blocks: torch.Tensor  # [blocks] int64 that hold the sequence up to the chunk's end
    num_cached_blocks: int  # the leading ones that hold the cached context
    cached_order: torch.Tensor  # [num_cached] int64: its rows in the rank-major gathered pages


class StepLayout:
    """A step's row bookkeeping on one rank, derived from lengths and block ids alone."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        sharding: Sharding,
        rank: int,
        device: torch.device = _CPU,
    ) -> None:
        place = _Place(sharding, rank, device)
        self.plan: QueryPlan = plan_queries([len(c.token_ids) for c in chunks], sharding.size)
        local_tokens = self.plan.local_tokens[rank]
        self.local_tokens = place.tensor(local_tokens)
        self.chunks: list[ChunkRows] = []
        begin = 0
        for chunk in chunks:
            self.chunks.append(_chunk_rows(chunk, begin, local_tokens, place))
            begin += len(chunk.token_ids)
        self.positions = place.tensor(
            np.concatenate([np.arange(c.first, c.end, dtype=np.int64) for c in chunks])
        )
        self.token_ids = place.tensor(
            np.concatenate([c.token_ids.astype(np.int64) for c in chunks])
        )
        self._restore = place.tensor(self.plan.restore)

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
        return joined[self._restore]


@dataclass(frozen=True)
class _Place:
    """Which rank it is, and where its tensors lie."""

    sharding: Sharding
    rank: int
    device: torch.device

    def tensor(self, numbers: IntArray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device)


def _chunk_rows(chunk: Chunk, begin: int, local_tokens: IntArray, place: _Place) -> ChunkRows:
    sharding = place.sharding
    end = begin + len(chunk.token_ids)
    own = np.flatnonzero((local_tokens >= begin) & (local_tokens < end))
    local = slice(int(own[0]), int(own[-1]) + 1) if len(own) else slice(0, 0)
    new = np.arange(chunk.num_cached, chunk.end, dtype=np.int64)
    kept = new[sharding.owner(new) == place.rank]
    row = sharding.local_row(kept)
    blocks = np.asarray(chunk.block_ids, np.int64)
    num_cached_blocks = -(-chunk.num_cached // sharding.effective_block_tokens)
    cached = np.arange(chunk.num_cached, dtype=np.int64)
    return ChunkRows(
        chunk=chunk,
        step_tokens=slice(begin, end),
        local=local,
        positions=place.tensor(local_tokens[local] - begin + chunk.first),
        kept_tokens=place.tensor(kept - chunk.first + begin),
        kept_slots=place.tensor(blocks[row // BLOCK_TOKENS] * BLOCK_TOKENS + row % BLOCK_TOKENS),
        blocks=place.tensor(blocks[: -(-chunk.end // sharding.effective_block_tokens)]),
        num_cached_blocks=num_cached_blocks,
        cached_order=place.tensor(sharding.gathered_row(cached, num_cached_blocks * BLOCK_TOKENS)),
    )


@dataclass(frozen=True)
class KvContext:
    """What every pass of every step needs."""

    pool: BlockPool
    ops: AttentionOps
    value_dim: int  # of attention's output: kv_lora_rank
    sharding: Sharding
    group: RankGroup


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
        self._ops = context.ops
        self._value_dim = context.value_dim
        self._group = context.group
        self._first_position = first_position
        self._new_rows = torch.empty(0)
        self._new_keys = torch.empty(0)
        self._chosen: list[torch.Tensor] = []

    def write(self, layer: int, new: NewKv) -> None:
        """See KvStep. Collective."""
        rows = self._ops.encode_rows(new.latent)
        self._new_rows = self._layout.restore(rows, self._group)
        for rows_of in self._layout.chunks:
            self._pool.write_rows(layer, rows_of.kept_slots, self._new_rows[rows_of.kept_tokens])
        if new.index_key is None:
            return
        keys = self._ops.encode_keys(new.index_key)
        self._new_keys = self._layout.restore(keys, self._group)
        for rows_of in self._layout.chunks:
            self._pool.write_keys(layer, rows_of.kept_slots, self._new_keys[rows_of.kept_tokens])

    def attend(self, layer: int, queries: Queries) -> torch.Tensor:
        """See KvStep. Collective."""
        if queries.index_query is not None:
            self._chosen = [
                self._choose(layer, rows_of, queries) for rows_of in self._layout.chunks
            ]
        out = queries.query.new_zeros((*queries.query.shape[:2], self._value_dim))
        for rows_of, chosen in zip(self._layout.chunks, self._chosen, strict=True):
            rows = self._context(rows_of, partial(self._pool.read_rows, layer), self._new_rows)
            out[rows_of.local] = self._ops.attend(queries.query[rows_of.local], rows, chosen)
        return out

    def _choose(self, layer: int, rows_of: ChunkRows, queries: Queries) -> torch.Tensor:
        assert queries.index_query is not None and queries.index_weights is not None
        read = partial(self._pool.read_keys, layer)
        records = self._context(rows_of, read, self._new_keys)
        return self._ops.choose(
            queries.index_query[rows_of.local],
            queries.index_weights[rows_of.local],
            records,
            rows_of.positions,
            self._first_position,
        )

    def _context(
        self,
        rows_of: ChunkRows,
        read: Callable[[torch.Tensor], torch.Tensor],  # block ids -> [blocks * 64, bytes]
        new: torch.Tensor,  # [num_tokens, bytes] the step's rows
    ) -> torch.Tensor:  # [chunk.end, bytes] the whole sequence so far, in position order
        """Cached rows of all ranks, then the chunk's new ones. Collective."""
        if self._group.size == 1:
            return read(rows_of.blocks)[: rows_of.chunk.end]
        fresh = new[rows_of.step_tokens][rows_of.chunk.num_recomputed :]
        if not rows_of.chunk.num_cached:
            return fresh
        gathered = self._group.all_gather(read(rows_of.blocks[: rows_of.num_cached_blocks]))
        return torch.cat((gathered[rows_of.cached_order], fresh))
