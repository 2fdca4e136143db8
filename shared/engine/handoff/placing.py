"""Copies checked rows out of staging memory into their pages, in token order.

On the CPU here; for a GPU see gpu_placing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared import farspan_pb2 as pb
from shared.engine.handoff.pull_plan import Piece
from shared.engine.handoff.relayout import copy_page, index_fields, mla_fields, strips
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding


@dataclass(frozen=True)
class Destination:
    """Where a sequence's pages go: page_ids[p] is the place of tokens [64 * p, 64 * p + 64)."""

    host_rows: torch.Tensor  # [num_mla_layers, num_pages, 64, row_bytes] uint8, on the host
    index_pages: torch.Tensor  # [num_index_layers, num_pages, index_page_bytes] uint8
    page_ids: Sequence[int]


@dataclass(frozen=True)
class Staged:
    """A piece as W ranks hold it. Block b of it is the piece's block first_block + b."""

    piece: Piece
    sharding: Sharding
    mla: torch.Tensor  # [W, blocks, num_mla_layers, 64 * row_bytes] uint8
    index: torch.Tensor  # [W, blocks, num_index_layers, index_page_bytes] uint8

    @property
    def pages(self) -> range:
        """The pages that the piece's tokens are in."""
        first, last = self.piece.first_token, self.piece.last_token
        return range(first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS))


class Placer(Protocol):
    """One way to copy; safe to use from several threads."""

    def place(self, staged: Staged, destination: Destination) -> None:
        """Write the piece's tokens, in all layers; other rows keep their bytes. Complete, for
        whoever looks, when this returns.
        """
        ...


class CpuPlacer:
    """Where staging and pools are all host memory."""

    def __init__(self, layout: pb.KvLayout) -> None:
        self._mla_fields = mla_fields(layout.row_bytes)
        self._index_fields = index_fields(layout.kv_format, layout.index_page_bytes)

    def place(self, staged: Staged, destination: Destination) -> None:
        """See Placer."""
        piece, sharding = staged.piece, staged.sharding
        for page in staged.pages:
            num_tokens = min(BLOCK_TOKENS, piece.last_token - page * BLOCK_TOKENS)
            parts = list(strips(page, num_tokens, sharding))
            block = page // sharding.size - piece.first_block
            page_id = destination.page_ids[page]
            rows = destination.host_rows[:, page_id].flatten(1)
            keys = destination.index_pages[:, page_id]
            copy_page(staged.mla[:, block], rows, parts, self._mla_fields, sharding)
            copy_page(staged.index[:, block], keys, parts, self._index_fields, sharding)
