"""The prefill ranks a decode worker has met: their memory's descriptors, and whether they are lost.

Metadata is added once per agent name, and a name is never removed and used again: names are fresh
per process, and adding a peer anew costs file descriptors on both sides that NIXL never returns.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared import farspan_pb2 as pb
from shared.engine.handoff.agent import NixlAgent
from shared.engine.kv.layout import IntArray
from shared.errors import ConfigError, WorkerLost

WORD_BYTES = 8  # an epoch or a generation


@dataclass(eq=False)
class RankPeer:
    """One rank of a prefill worker."""

    regions: pb.RankRegions
    descriptors: Any  # num_blocks latent extents, num_blocks index extents, then the table's words
    loss: str | None = None  # why it is gone for good

    def extent_ids(self, block_ids: IntArray) -> IntArray:
        """Descriptors of the blocks' latent extents, then of their index extents."""
        return np.concatenate((block_ids, self.regions.num_blocks + block_ids))

    def word_ids(self, block_ids: IntArray) -> IntArray:
        """Descriptors of the epoch word, then of the blocks' generations."""
        epoch = 2 * self.regions.num_blocks
        return np.concatenate(([epoch], epoch + 1 + block_ids))


class RankPeers:
    """All ranks met since the start; safe to use from several threads."""

    def __init__(self, agent: NixlAgent, mla_bytes: int, index_bytes: int) -> None:
        self._agent = agent
        self._mla_bytes = mla_bytes  # of one block of one rank
        self._index_bytes = index_bytes
        self._lock = threading.Lock()
        self._known: dict[str, RankPeer] = {}

    def find(self, regions: pb.RankRegions) -> RankPeer:
        """The rank behind these regions. Raises WorkerLost for a lost or contradictory one."""
        with self._lock:
            peer = self._known.get(regions.agent_name)
            if peer is None:
                peer = self._known[regions.agent_name] = self._meet(regions)
        if peer.loss is not None:
            raise WorkerLost(peer.loss)
        if peer.regions != regions:
            raise WorkerLost(f"{regions.agent_name} offers other regions than before")
        return peer

    def _meet(self, regions: pb.RankRegions) -> RankPeer:
        if regions.memory_kind != "DRAM":
            raise ConfigError(f"KV pools in {regions.memory_kind!r} memory cannot be pulled")
        name = self._agent.add_peer(regions.agent_metadata)
        if name != regions.agent_name:
            raise WorkerLost(f"the metadata of {name} came as that of {regions.agent_name}")
        ranges = [
            (regions.mla_base, self._mla_bytes, regions.num_blocks),
            (regions.index_base, self._index_bytes, regions.num_blocks),
            (regions.generation_base, WORD_BYTES, 1 + regions.num_blocks),
        ]
        return RankPeer(regions, self._agent.peer_ranges(name, ranges))
