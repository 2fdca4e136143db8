"""Placing by a GPU's kernels: rows into pinned host memory, index pages into the GPU's own.

Staging may be the GPU's memory or pinned host memory. Nothing is allocated after the start, so a
GPU that is full still takes what it was promised.
"""

import queue
from dataclasses import dataclass

import torch

from shared import farspan_pb2 as pb
from shared.engine.handoff.placing import Destination, Staged
from shared.engine.handoff.pull_plan import Piece
from shared.engine.handoff.relayout import Field, index_fields, mla_fields
from shared.engine.kernels.place_pages import place_pages
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding

_HOST_PROGRAMS = 16  # fill the PCIe link, and leave the other multiprocessors to decode
_DEVICE_PROGRAMS = 264


@dataclass(frozen=True)
class _Channel:
    """What one placing at a time needs."""

    stream: torch.cuda.Stream
    sent_ids: torch.Tensor  # [max_pages] int64, pinned
    page_ids: torch.Tensor  # [max_pages] int64, on the device


class GpuPlacer:
    """See Placer. Streams are made once: torch hands out 32 in turn, and others wait on theirs."""

    def __init__(
        self,
        device: torch.device,
        layout: pb.KvLayout,
        max_pages: int,  # of one piece
        num_at_once: int,
    ) -> None:
        self._device = device
        self._mla_fields = mla_fields(layout.row_bytes)
        self._index_fields = index_fields(layout.kv_format, layout.index_page_bytes)
        self._channels: queue.SimpleQueue[_Channel] = queue.SimpleQueue()
        for _ in range(num_at_once):
            ids = torch.empty(max_pages, dtype=torch.int64)
            self._channels.put(
                _Channel(torch.cuda.Stream(device), ids.pin_memory(), ids.to(device))
            )
        self._compile(layout)

    def place(self, staged: Staged, destination: Destination) -> None:
        """See Placer."""
        channel = self._channels.get()
        try:
            with torch.cuda.stream(channel.stream):
                self._launch(staged, destination, channel)
        finally:
            # After an error, too: what was launched still reads the channel and writes the pages.
            channel.stream.synchronize()
            self._channels.put(channel)

    def _launch(self, staged: Staged, destination: Destination, channel: _Channel) -> None:
        pages = staged.pages
        ids = torch.tensor([destination.page_ids[page] for page in pages], dtype=torch.int64)
        channel.sent_ids[: len(ids)] = ids
        page_ids = channel.page_ids[: len(ids)]
        page_ids.copy_(channel.sent_ids[: len(ids)], non_blocking=True)
        rows = destination.host_rows.view(*destination.host_rows.shape[:2], -1)
        for field in self._mla_fields:
            _place(staged, staged.mla, rows, field, page_ids, _HOST_PROGRAMS)
        for field in self._index_fields:
            _place(staged, staged.index, destination.index_pages, field, page_ids, _DEVICE_PROGRAMS)

    def _compile(self, layout: pb.KvLayout) -> None:
        """Place a page of zeros: a first pull would wait for the compiler."""
        page_bytes = BLOCK_TOKENS * layout.row_bytes
        shapes = (
            (1, 1, layout.num_mla_layers, page_bytes),
            (1, 1, layout.num_index_layers, layout.index_page_bytes),
        )
        mla, index = (torch.zeros(s, dtype=torch.uint8, device=self._device) for s in shapes)
        rows = torch.zeros(
            (layout.num_mla_layers, 1, BLOCK_TOKENS, layout.row_bytes),
            dtype=torch.uint8,
            pin_memory=True,
        )
        piece = Piece(0, BLOCK_TOKENS, 0, 1, ((0,),))
        torch.cuda.synchronize(self._device)
        self.place(
            Staged(piece, Sharding(1, BLOCK_TOKENS), mla, index),
            Destination(rows, index[0].transpose(0, 1).clone(), [0]),
        )


def _place(
    staged: Staged,
    shards: torch.Tensor,  # [W, blocks, layers, page_bytes]
    pages: torch.Tensor,  # [layers, num_pages, page_bytes]
    field: Field,
    page_ids: torch.Tensor,
    num_programs: int,
) -> None:
    piece, sharding = staged.piece, staged.sharding
    place_pages(
        _rows(shards, field),
        sharding,
        staged.pages.start - piece.first_block * sharding.size,
        piece.last_token - piece.first_token,
        page_ids,
        _rows(pages, field),
        num_programs,
    )


def _rows(pages: torch.Tensor, field: Field) -> torch.Tensor:
    stop = field.offset + BLOCK_TOKENS * field.row_bytes
    return pages[..., field.offset : stop].view(*pages.shape[:-1], BLOCK_TOKENS, field.row_bytes)
