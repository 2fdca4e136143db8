"""Decode's KV tensors: the host tier, the device rows and the index pages.

Knows bytes and places, no policy. Both row pools are layer-major: single rows are gathered fast
only when one layer is compact (37-40 GB/s, 19-26 when spread over GiBs; one H200). Row ids are
64-bit: a row's byte offset passes 2**31 at 3.3 million rows of 656 bytes.
"""

from dataclasses import dataclass

import torch

from shared.block_hash import BLOCK_TOKENS
from shared.engine.kv.layout import IntArray

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TierShape:
    """Sizes of the three pools. A block's host page and index page have its block id."""

    num_mla_layers: int
    num_index_layers: int
    row_bytes: int
    index_page_bytes: int
    num_host_pages: int
    num_device_pages: int

    @property
    def host_bytes(self) -> int:
        """Size of the host pool."""
        return self.num_mla_layers * self.num_host_pages * BLOCK_TOKENS * self.row_bytes


@dataclass(frozen=True)
class WriteSlots:
    """Where a sequence's new rows go."""

    host_rows: torch.Tensor  # [n] int64
    device_rows: torch.Tensor  # [num_mirrored] int64
    mirrored: torch.Tensor | None  # [num_mirrored] int64 which of the n; None = all


class TierPools:
    """The three pools. Host rows are authoritative; a device row is a copy of one."""

    def __init__(
        self,
        shape: TierShape,
        device: torch.device = _CPU,
        host_memory: torch.Tensor | None = None,  # [host_bytes] uint8 that the device reads; given
        # for a device other than the CPU
    ) -> None:
        def rows(num_pages: int) -> tuple[int, int, int]:
            return (shape.num_mla_layers, num_pages * BLOCK_TOKENS, shape.row_bytes)

        if host_memory is None:
            host_memory = torch.zeros(shape.host_bytes, dtype=torch.uint8)
        self.shape = shape
        self.host_rows = host_memory.view(rows(shape.num_host_pages))
        self.device_rows = torch.zeros(
            rows(shape.num_device_pages), dtype=torch.uint8, device=device
        )
        self.index_pages = torch.zeros(
            (shape.num_index_layers, shape.num_host_pages, shape.index_page_bytes),
            dtype=torch.uint8,
            device=device,
        )

    def write(
        self,
        layer: int,
        slots: WriteSlots,
        rows: torch.Tensor,  # [n, row_bytes] uint8
    ) -> None:
        """Store rows on the host and, at once, in their resident pages: those are always clean."""
        self.host_rows[layer].index_copy_(0, slots.host_rows, rows)
        mirrored = rows if slots.mirrored is None else rows[slots.mirrored]
        self.device_rows[layer].index_copy_(0, slots.device_rows, mirrored)

    def fetch_rows(
        self,
        layer: int,
        host_rows: torch.Tensor,  # [n] int64
        device_rows: torch.Tensor,  # [n] int64
    ) -> None:
        """Copy single rows of one layer to the device."""
        fetched = self.host_rows[layer].index_select(0, host_rows)
        self.device_rows[layer].index_copy_(0, device_rows, fetched)

    def fetch_pages(
        self,
        host_pages: IntArray,  # [n]
        device_pages: IntArray,  # [n]
    ) -> None:
        """Copy whole pages to the device, all layers."""
        for host_page, device_page in zip(host_pages.tolist(), device_pages.tolist(), strict=True):
            source, target = host_page * BLOCK_TOKENS, device_page * BLOCK_TOKENS
            self.device_rows[:, target : target + BLOCK_TOKENS] = self.host_rows[
                :, source : source + BLOCK_TOKENS
            ]
