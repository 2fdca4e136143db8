"""The prefill worker's KV tensors on one rank: block-major extents, ready to be pulled.

Block b of a rank is two contiguous extents, its MLA rows and its index pages, so a handoff needs
two descriptors per block. The generation table stands beside them: word 0 the worker's epoch, word
1 + b the generation of block b.
"""

from collections.abc import Sequence

import torch

from shared.engine.kv.format import KvFormat, page_geometry
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.model.config import ModelConfig
from shared.engine.step import BlockCopy

_CPU = torch.device("cpu")


class BlockPool:
    """Pages of one rank; written by its step thread only."""

    def __init__(
        self,
        config: ModelConfig,
        kv_format: KvFormat,
        num_blocks: int,
        epoch: int,
        *,
        device: torch.device = _CPU,
    ) -> None:
        self._geometry = page_geometry(kv_format)
        self._index_ordinal = {layer: i for i, layer in enumerate(config.index_layers)}
        self.rows = torch.zeros(
            (num_blocks, config.num_kv_layers, BLOCK_TOKENS, kv_format.row_bytes),
            dtype=torch.uint8,
            device=device,
        )
        self.index_pages = torch.zeros(
            (num_blocks, len(config.index_layers), self._geometry.page_bytes),
            dtype=torch.uint8,
            device=device,
        )
        # On the host wherever the rows lie: it is a word a block, written between steps.
        self.generations = torch.zeros(1 + num_blocks, dtype=torch.int64)
        self.generations[0] = epoch

    def set_generations(self, updates: Sequence[tuple[int, int]]) -> None:
        """Record that blocks were handed out anew; must precede the first write to them."""
        for block_id, generation in updates:
            self.generations[1 + block_id] = generation

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, all layers."""
        for copy in copies:
            self.rows[copy.target] = self.rows[copy.source]
            self.index_pages[copy.target] = self.index_pages[copy.source]

    def write_rows(
        self,
        layer: int,
        slots: torch.Tensor,  # [n] int64 block * 64 + offset
        rows: torch.Tensor,  # [n, row_bytes] uint8
    ) -> None:
        """Store latent rows."""
        self.rows[:, layer][slots // BLOCK_TOKENS, slots % BLOCK_TOKENS] = rows

    def write_keys(
        self,
        layer: int,
        slots: torch.Tensor,  # [n] int64
        records: torch.Tensor,  # [n, key record] uint8
    ) -> None:
        """Store index keys of a layer that owns an indexer."""
        self._geometry.write(self.index_pages[:, self._index_ordinal[layer]], slots, records)

    def read_rows(
        self,
        layer: int,
        block_ids: torch.Tensor,  # [num] int64
    ) -> torch.Tensor:  # [num * 64, row_bytes] uint8
        """All rows of the blocks, in order."""
        return self.rows[:, layer][block_ids].flatten(0, 1)

    def read_keys(
        self,
        layer: int,
        block_ids: torch.Tensor,  # [num] int64
    ) -> torch.Tensor:  # [num * 64, key record] uint8
        """All index keys of the blocks, in order."""
        return self._geometry.records(self.index_pages[block_ids, self._index_ordinal[layer]])
