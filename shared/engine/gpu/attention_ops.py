"""Attention over encoded rows with the kernels: FP8 scores, an exact choice, bf16 rows attended.

Rows are dequantised once a layer and chunk: faster than in every query's inner loop, since each
row is read by thousands of queries (design.md, kernels).
"""

import torch

from shared.engine.gpu.supported import require_supported
from shared.engine.kernels.dequantise_rows import dequantise_range
from shared.engine.kernels.indexer_logits import indexer_logits
from shared.engine.kernels.sparse_mla_prefill import sparse_mla_prefill
from shared.engine.kernels.top_k import top_k
from shared.engine.kv.format import KvFormat, quantise_tiles
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.model.config import AttentionConfig

_TILE_SCORES = 1 << 28  # fp32 scores held at once while choosing: 1 GiB
_STEP = 16  # scores of a row begin at, and are, multiples of this


def quantise_query(
    query: torch.Tensor,  # [n, index_heads, index_dim]
    weights: torch.Tensor,  # [n, index_heads] fp32
) -> tuple[torch.Tensor, torch.Tensor]:  # the query as e4m3, weights with its scale
    """The indexer's query as its kernels take it.

    The query's scale is positive, so it commutes with ReLU and rides on the head's weight.
    """
    values, scale = quantise_tiles(query.float())
    return values, weights * scale


class GpuAttentionOps:
    """See AttentionOps. ConfigError for a KV format or a model that the kernels do not read."""

    def __init__(self, kv_format: KvFormat, config: AttentionConfig) -> None:
        require_supported(kv_format.name, config)
        self._format = kv_format
        self._config = config

    def encode_rows(self, latent: torch.Tensor) -> torch.Tensor:
        """See AttentionOps."""
        return self._format.encode_rows(latent.float())

    def encode_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """See AttentionOps."""
        return self._format.encode_keys(keys.float())

    def choose(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        records: torch.Tensor,
        limits: torch.Tensor,
        first: int,
    ) -> torch.Tensor:  # [n, topk] int32
        """See AttentionOps."""
        topk, num_seen = self._config.index_topk, len(records) - first
        if num_seen <= topk:
            positions = torch.arange(first, first + topk, dtype=torch.int32, device=query.device)
            return torch.where(positions <= limits[:, None], positions, -1).int()
        values, weights = quantise_query(query, weights)
        dim = self._config.index_dim
        keys = records[:, :dim].contiguous().view(torch.float8_e4m3fn)
        key_scales = records[:, dim:].contiguous().view(torch.float32).squeeze(1)
        starts = torch.full_like(limits, first, dtype=torch.int32)
        ends = (limits + 1).int()
        width = -(-num_seen // _STEP) * _STEP
        tile = min(len(query), max(1, _TILE_SCORES // width))
        scores = query.new_empty((tile, width), dtype=torch.float32)
        chosen = query.new_empty((len(query), topk), dtype=torch.int32)
        for begin in range(0, len(query), tile):
            part = slice(begin, begin + tile)
            held = scores[: len(query[part])]
            indexer_logits(
                values[part], weights[part], keys, key_scales, starts[part], ends[part], held
            )
            lengths = (ends[part] - starts[part]).clamp_min(0)
            chosen[part] = top_k(held, lengths, topk, first)
        return chosen

    def attend(self, query: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See AttentionOps."""
        num_whole = len(rows) // BLOCK_TOKENS * BLOCK_TOKENS
        scratch = query.new_empty((len(rows), self._config.latent_dim), dtype=torch.bfloat16)
        dequantise_range(_pages(rows[:num_whole]), 0, scratch[:num_whole])
        if num_whole < len(rows):
            last = rows.new_zeros((BLOCK_TOKENS, rows.shape[1]))
            last[: len(rows) - num_whole] = rows[num_whole:]
            dequantise_range(_pages(last), 0, scratch[num_whole:])
        out, _ = sparse_mla_prefill(query.contiguous(), scratch, chosen, self._config.scale)
        return out


def _pages(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, BLOCK_TOKENS, rows.shape[1])
