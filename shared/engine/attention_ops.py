"""What attention does with encoded rows, as the processor at hand does it.

The KV of a step (prefill_kv) knows which rows are written and read; how they are encoded, scored
and attended is an `AttentionOps`: here in torch on a CPU, and in `gpu/` with kernels.
"""

from typing import Protocol

import torch

from shared.engine.attention import Select, select_positions, sparse_attention
from shared.engine.kv.format import KvFormat
from shared.engine.model.config import AttentionConfig


class AttentionOps(Protocol):
    """Each method is a function of its tensors; rows do not depend on one another."""

    def encode_rows(self, latent: torch.Tensor) -> torch.Tensor:
        """[n, latent_dim] -> [n, row_bytes] uint8."""
        ...

    def encode_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """[n, index_dim] -> [n, key record] uint8."""
        ...

    def choose(
        self,
        query: torch.Tensor,  # [n, index_heads, index_dim]
        weights: torch.Tensor,  # [n, index_heads] fp32, scales included
        records: torch.Tensor,  # [num_keys, key record] uint8, in position order
        limits: torch.Tensor,  # [n] int64: query i may choose positions first..limits[i]
        first: int,
    ) -> torch.Tensor:  # [n, topk], -1 = none; for `attend` alone
        """The positions each query attends to."""
        ...

    def attend(
        self,
        query: torch.Tensor,  # [n, heads, latent_dim]
        rows: torch.Tensor,  # [num_rows, row_bytes] uint8, in position order
        chosen: torch.Tensor,  # [n, topk] as `choose` gave it
    ) -> torch.Tensor:  # [n, heads, kv_lora_rank] of the query's type
        """Softmax attention of each query over its own rows."""
        ...


class CpuAttentionOps:
    """In torch, every operation as exact as the format."""

    def __init__(
        self, kv_format: KvFormat, config: AttentionConfig, select: Select = select_positions
    ) -> None:
        self._format = kv_format
        self._config = config
        self._select = select

    def encode_rows(self, latent: torch.Tensor) -> torch.Tensor:
        """See AttentionOps."""
        return self._format.encode_rows(latent)

    def encode_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """See AttentionOps."""
        return self._format.encode_keys(keys)

    def choose(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        records: torch.Tensor,
        limits: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        """See AttentionOps."""
        rounded, keys = self._format.round_query(query), self._format.decode_keys(records)
        return self._select(rounded, weights, keys, limits, first, self._config.index_topk)

    def attend(self, query: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See AttentionOps."""
        config, decoded = self._config, self._format.decode_rows(rows)
        return sparse_attention(query, decoded, chosen, config.kv_lora_rank, config.scale)
