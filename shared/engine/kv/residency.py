"""Which sequences keep all their pages on the device, and what a sequence costs there.

Pure arithmetic; knows no tensors. A sequence that cannot keep every page resident reads the others
row by row through hot rows: a fixed number of device pages, whatever its length.
"""

import sys
from dataclasses import dataclass
from enum import StrEnum

from shared.block_hash import BLOCK_TOKENS
from shared.errors import ConfigError

# The newest rows are written on the device; with draft tokens a step may straddle two pages.
TAIL_PAGES = 2


class ResidencyMode(StrEnum):
    """Where KV lies while a sequence decodes."""

    ALL_RESIDENT = "all-resident"  # host memory holds copies only
    MIXED = "mixed"  # resident while there is room, hot rows under pressure
    ALL_HOST = "all-host"  # all but the tail pages are read through hot rows


@dataclass(frozen=True)
class ResidencyPolicy:
    """The two thresholds all modes come down to, and the price of a sequence."""

    hot_pages: int  # device pages a sequence leases for hot rows
    max_whole_pages: int  # a sequence of at most so many blocks is never unpinned
    min_free_pages: int  # pages are unpinned until so many are free

    def is_whole(self, num_blocks: int) -> bool:
        """Whether a sequence of num_blocks keeps all its pages resident."""
        return num_blocks <= self.max_whole_pages

    def device_pages(self, num_tokens: int) -> int:
        """The most device pages a sequence of num_tokens can insist on; admission reserves them."""
        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        return num_blocks if self.is_whole(num_blocks) else self.hot_pages + TAIL_PAGES

    def max_sequence_tokens(self, num_host_pages: int, num_device_pages: int) -> int:
        """The longest sequence that fits when it is alone."""
        if self.device_pages(num_host_pages * BLOCK_TOKENS) <= num_device_pages:
            return num_host_pages * BLOCK_TOKENS
        return min(num_host_pages, self.max_whole_pages, num_device_pages) * BLOCK_TOKENS


def make_policy(
    mode: ResidencyMode, *, hot_rows: int, union_rows: int, num_device_pages: int
) -> ResidencyPolicy:
    """The mode's policy; ConfigError if hot rows are no whole pages or fewer than one step selects.

    `union_rows` is the most rows one attention call of a sequence reads: query tokens times top-k.
    """
    hot_pages, rest = divmod(hot_rows, BLOCK_TOKENS)
    if rest or hot_rows < union_rows:
        raise ConfigError(
            f"{hot_rows} hot rows must be a multiple of {BLOCK_TOKENS}"
            f" and at least the {union_rows} rows that one step can select"
        )
    match mode:
        case ResidencyMode.ALL_RESIDENT:
            return ResidencyPolicy(hot_pages, max_whole_pages=sys.maxsize, min_free_pages=0)
        case ResidencyMode.MIXED:
            # A tenth of the pool or one lease, so that a step's needs rarely wait for unpinning.
            reserve = max(hot_pages, num_device_pages // 10)
            return ResidencyPolicy(hot_pages, hot_pages + TAIL_PAGES, reserve)
        case ResidencyMode.ALL_HOST:
            return ResidencyPolicy(hot_pages, TAIL_PAGES, min_free_pages=num_device_pages)
