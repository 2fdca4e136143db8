"""The memory NIXL reads land in: lanes, never lent again while a read may still write them.

A NIXL read cannot be cancelled: after a time-out its bytes may land at any later moment. A lane
given back with such reads is quarantined until each of them is known to be over. Knows slots and
reads, not NIXL.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch

from shared import farspan_pb2 as pb
from shared.engine.kv.layout import BLOCK_TOKENS, IntArray
from shared.errors import ConfigError, Overloaded

_CPU = torch.device("cpu")
_QUARANTINE_POLL_S = 0.005


class PostedRead(Protocol):
    """A read on its way."""

    def is_over(self) -> bool:
        """Whether it has completed or failed, so that nothing of it can land any more."""
        ...


@dataclass(frozen=True)
class Slots:
    """The staging memory; a slot holds one block of one rank. Allocated once, never moved."""

    mla: torch.Tensor  # [num_slots, num_mla_layers, 64 * row_bytes] uint8, on any device
    index: torch.Tensor  # [num_slots, num_index_layers, index_page_bytes] uint8, on the same
    generations: torch.Tensor  # [num_slots] int64, of the block in each slot
    epochs: torch.Tensor  # [num_slots] int64; a pull keeps rank r's in slot r of its lane

    @property
    def extents(self) -> tuple[torch.Tensor, ...]:
        """What blocks land in; a descriptor list over these counts each tensor's slots in turn."""
        return self.mla, self.index

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        """What words land in, always on the host; its descriptors are counted likewise."""
        return self.generations, self.epochs

    def extent_ids(self, slots: IntArray) -> IntArray:
        """Descriptors of the slots' latent extents, then of their index extents."""
        return np.concatenate((slots, len(self.mla) + slots))

    def word_ids(self, epoch_slot: int, slots: IntArray) -> IntArray:
        """Descriptors of one epoch word, then of the slots' generations."""
        return np.concatenate(([len(self.generations) + epoch_slot], slots))


def allocate_slots(
    layout: pb.KvLayout,
    num_slots: int,
    device: torch.device = _CPU,
    *,
    pin_memory: bool = False,  # host memory that a GPU reads
) -> Slots:
    """Memory for num_slots blocks of the layout's pages. ConfigError when there is not enough."""
    mla_shape = (num_slots, layout.num_mla_layers, BLOCK_TOKENS * layout.row_bytes)
    index_shape = (num_slots, layout.num_index_layers, layout.index_page_bytes)
    zeros = partial(torch.zeros, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    try:
        mla, index = zeros(mla_shape), zeros(index_shape)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"no room for {num_slots} blocks of staging: {error}") from error
    return Slots(
        mla=mla,
        index=index,
        generations=torch.zeros(num_slots, dtype=torch.int64),
        epochs=torch.zeros(num_slots, dtype=torch.int64),
    )


def slots_per_lane(layout: pb.KvLayout, staging_bytes: int, num_lanes: int) -> int:
    """How many slots each lane gets; ConfigError when that is none."""
    slot_bytes = (
        layout.num_mla_layers * BLOCK_TOKENS * layout.row_bytes
        + layout.num_index_layers * layout.index_page_bytes
    )
    num_slots = staging_bytes // (num_lanes * slot_bytes)
    if num_slots == 0:
        raise ConfigError(
            f"{staging_bytes} bytes of staging hold no block of {slot_bytes} bytes in each of"
            f" {num_lanes} lanes"
        )
    return num_slots


@dataclass(eq=False)
class Lane:
    """Slots [first_slot, first_slot + num_slots), used by one pull at a time."""

    first_slot: int
    num_slots: int
    reads: list[PostedRead] = field(default_factory=list)  # posted and not known to be over

    def has_unfinished_reads(self) -> bool:
        """Whether bytes may still land here; forgets the reads that are over."""
        self.reads = [read for read in self.reads if not read.is_over()]
        return bool(self.reads)


class Lanes:
    """Lends lanes; safe to use from several threads."""

    def __init__(self, num_lanes: int, num_slots: int) -> None:
        self._changed = threading.Condition()
        self._free = [Lane(i * num_slots, num_slots) for i in range(num_lanes)]
        self._quarantined: list[Lane] = []

    @contextmanager
    def borrow(self, deadline: float) -> Iterator[Lane]:
        """A lane nobody else uses; Overloaded when none is free at `deadline` (monotonic)."""
        lane = self._take(deadline)
        try:
            yield lane
        finally:
            with self._changed:
                (self._quarantined if lane.reads else self._free).append(lane)
                self._changed.notify()

    @property
    def num_quarantined(self) -> int:
        """Lanes that wait for the end of a read; asking polls those reads."""
        with self._changed:
            self._reap()
            return len(self._quarantined)

    def _take(self, deadline: float) -> Lane:
        with self._changed:
            while True:
                self._reap()
                if self._free:
                    return self._free.pop()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise Overloaded(
                        f"no staging lane came free ({len(self._quarantined)} quarantined)"
                    )
                poll_s = _QUARANTINE_POLL_S if self._quarantined else remaining
                self._changed.wait(min(remaining, poll_s))

    def _reap(self) -> None:
        waiting = [lane for lane in self._quarantined if lane.has_unfinished_reads()]
        self._free += [lane for lane in self._quarantined if lane not in waiting]
        self._quarantined = waiting
