"""Decode's pools as a pull sees them: pages by block id.

Decode's service holds it and never touches the tensors inside.
"""

from collections.abc import Sequence

from shared.engine.handoff.placing import Destination
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.tier_pools import TierPools


class Landing:
    """Where handed-over KV goes. A block's host page and index page have its block id."""

    def __init__(self, pools: TierPools) -> None:
        self._host_rows = pools.host_rows.unflatten(1, (-1, BLOCK_TOKENS))
        self._index_pages = pools.index_pages

    def of(self, block_ids: Sequence[int]) -> Destination:
        """The pages of a sequence's blocks, in order."""
        return Destination(self._host_rows, self._index_pages, list(block_ids))
