"""What a group of layers has to copy from the host before it may attend.

One plan serves all layers of a group, since they read the same positions: the owner resolves, and
every layer replays the copies on its own plane.
"""

from dataclasses import dataclass

import torch

from shared.engine.kv.tier_pools import TierPools


@dataclass(frozen=True)
class IndexGroup:
    """Layers that attend to the same positions: an indexer's owner and those that reuse it."""

    owner: int
    followers: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """All of them."""
        return (self.owner, *self.followers)


@dataclass
class GroupCounters:
    """What a group's selections cost since start. Hits and misses count distinct rows of a step."""

    resident: int = 0  # selected entries read from resident pages, repeats included
    hits: int = 0
    misses: int = 0
    host_bytes: int = 0


class FetchPlan:
    """Rows a group's attention needs on the device; each layer of the group fetches its own."""

    def __init__(
        self,
        pools: TierPools,
        group: IndexGroup,
        counters: GroupCounters,
        host_rows: torch.Tensor,  # [n] int64
        device_rows: torch.Tensor,  # [n] int64
        *,
        moves_bytes: bool,
    ) -> None:
        self._pools = pools
        self._counters = counters
        self._moves_bytes = moves_bytes
        self._layers = frozenset(group.layers)
        self._outstanding = set(group.layers) if len(host_rows) else set()
        self.host_rows = host_rows
        self.device_rows = device_rows

    @property
    def is_complete(self) -> bool:
        """Whether every layer of the group has fetched."""
        return not self._outstanding

    def fetch(self, layer: int) -> None:
        """Copy the missing rows of one of the group's layers; call it before its attention."""
        if layer not in self._layers:
            raise ValueError(f"layer {layer} is not of the group {sorted(self._layers)}")
        if layer not in self._outstanding:
            return
        if self._moves_bytes:
            self._pools.fetch_rows(layer, self.host_rows, self.device_rows)
            self._outstanding.remove(layer)
            self._counters.host_bytes += len(self.host_rows) * self._pools.shape.row_bytes


@dataclass(frozen=True)
class ResolvedRows:
    """Where the selected positions lie on the device, once the plan is fetched."""

    row_ids: torch.Tensor  # int64, shaped like the positions; -1 where they are -1
    plan: FetchPlan
