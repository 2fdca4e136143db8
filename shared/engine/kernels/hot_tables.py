"""What the residency kernels share: the tables of hot rows, and what one resolution yields.

All of it lies on the device and is changed by kernels: a decode step never asks the host. The CPU
twins are `HotRows` and `FetchPlan`.
"""

from dataclasses import dataclass
from typing import Self

import torch

from shared.engine.kv.layout import BLOCK_TOKENS

MAX_HOT_ROWS = 2**15 - 1  # int16 order
_UNWANTED = 2**31 - 1


@dataclass(frozen=True)
class HotTables:
    """What lies in the leased pages, for each index-sharing group; changed in place by kernels."""

    pages: torch.Tensor  # [num_leases, hot_pages] int32 device pages
    keys: torch.Tensor  # [num_groups, num_leases, hot_pages * 64] int32 host rows, -1 = empty
    order: torch.Tensor  # the same shape, int16: hot rows, least recently used first

    @classmethod
    def allocate(
        cls, num_groups: int, num_leases: int, hot_pages: int, device: torch.device
    ) -> Self:
        """Empty tables; the leases have no pages yet."""
        hot_rows = hot_pages * BLOCK_TOKENS
        if hot_rows > MAX_HOT_ROWS:
            raise ValueError(f"{hot_rows} hot rows, at most {MAX_HOT_ROWS} fit the order")
        shape = (num_groups, num_leases, hot_rows)
        return cls(
            torch.zeros((num_leases, hot_pages), dtype=torch.int32, device=device),
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.arange(hot_rows, dtype=torch.int16, device=device).expand(shape).contiguous(),
        )

    def begin(self, lease: int, pages: torch.Tensor) -> None:
        """Lease these pages anew, [hot_pages] int32; all of their rows are empty."""
        self.pages[lease].copy_(pages, non_blocking=True)
        self.keys[:, lease] = -1


@dataclass(frozen=True)
class MissPlan:
    """Rows to copy from the host; every layer of the group replays it on its own plane."""

    host_rows: torch.Tensor  # [num_requests, num_selected] int32, the first num_misses count
    device_rows: torch.Tensor  # the same shape, int32: where each goes
    num_misses: torch.Tensor  # [num_requests] int32


@dataclass(frozen=True)
class Resolution:
    """What `resolve_rows` writes, at fixed addresses."""

    row_ids: torch.Tensor  # [num_requests, num_queries, top_k] int32 device rows, -1 = none
    plan: MissPlan
    # [num_requests, 3] int32: entries read from resident pages, distinct hot rows found, and cold
    # entries of a request that has no lease (a caller's error; their row ids are -1)
    counts: torch.Tensor

    @classmethod
    def allocate(
        cls, num_requests: int, num_queries: int, top_k: int, device: torch.device
    ) -> Self:
        """For batches of exactly this shape."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        selected = num_queries * top_k
        plan = MissPlan(
            empty(num_requests, selected), empty(num_requests, selected), empty(num_requests)
        )
        return cls(empty(num_requests, num_queries, top_k), plan, empty(num_requests, 3))


@dataclass(frozen=True)
class BatchBlocks:
    """Where a batch's blocks lie."""

    page_table: torch.Tensor  # [num_requests, max_blocks] int32 block ids
    leases: torch.Tensor  # [num_requests] int32, all different, -1 = none
    first_rows: torch.Tensor  # [num_blocks] int64 a block's first device row, negative = none


def make_scratch(
    num_requests: int, num_blocks: int, device: torch.device
) -> torch.Tensor:  # [num_requests, num_blocks * 64] int32
    """The map by host row in which `resolve_rows` works; it leaves the map as it found it.

    One serves all groups, as long as their resolutions run one after another.
    """
    shape = (num_requests, num_blocks * BLOCK_TOKENS)
    return torch.full(shape, _UNWANTED, dtype=torch.int32, device=device)
