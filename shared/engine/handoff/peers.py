"""The prefill ranks a decode worker has met: their memory's descriptors, and whether they are lost.

Metadata is added once per agent name, and a name is never used again: names are fresh per process,
and adding a peer anew costs file descriptors on both sides that NIXL never returns.

A dead process's GPU memory stays taken for as long as another has it mapped, and its successor may
find no room. So dead ranks are looked for, and unmapped.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared import farspan_pb2 as pb
from shared.engine.handoff.agent import HOST, MemoryPlace, NixlAgent, Read
from shared.engine.kv.layout import IntArray
from shared.errors import ConfigError, WorkerLost

WORD_BYTES = 8  # an epoch or a generation
_FIRST = np.zeros(1, np.int64)


@dataclass(eq=False)
class RankPeer:
    """One rank of a prefill worker."""

    regions: pb.RankRegions
    place: MemoryPlace  # of the pools
    extents: Any  # descriptors of num_blocks latent extents, then of num_blocks index extents
    words: Any  # descriptors of the generation table's words
    loss: str | None = None  # why it is gone for good
    num_pulls: int = 0  # under way
    is_mapped: bool = True
    probe: Read | None = None  # of its epoch, to see whether it lives

    def extent_ids(self, block_ids: IntArray) -> IntArray:
        """Descriptors of the blocks' latent extents, then of their index extents."""
        return np.concatenate((block_ids, self.regions.num_blocks + block_ids))

    def word_ids(self, block_ids: IntArray) -> IntArray:
        """Descriptors of the epoch word, then of the blocks' generations."""
        return np.concatenate(([0], 1 + block_ids))


class RankPeers:
    """All ranks met since the start; safe to use from several threads."""

    def __init__(self, agent: NixlAgent, mla_bytes: int, index_bytes: int) -> None:
        self._agent = agent
        self._mla_bytes = mla_bytes  # of one block of one rank
        self._index_bytes = index_bytes
        self._lock = threading.Lock()
        self._known: dict[str, RankPeer] = {}
        self._probed = torch.zeros(1, dtype=torch.int64)  # never looked at: reads may land late
        agent.register(self._probed)
        self._own_word = agent.own_ranges([(self._probed.data_ptr(), WORD_BYTES, 1)], HOST)

    @contextmanager
    def borrow(self, ranks: Sequence[pb.RankRegions]) -> Iterator[list[RankPeer]]:
        """The ranks behind these regions, mapped inside the block.

        Raises WorkerLost for a lost or contradictory one.
        """
        with self._lock:
            peers = [self._find(regions) for regions in ranks]
            for peer in peers:
                peer.num_pulls += 1
        try:
            yield peers
        finally:
            with self._lock:
                for peer in peers:
                    peer.num_pulls -= 1

    def find_dead(self) -> list[RankPeer]:
        """Ranks that have died with GPU memory that is mapped here, and that no pull uses.

        To be called by one thread.
        """
        with self._lock:
            peers = [
                peer
                for peer in self._known.values()
                if peer.place.kind == "VRAM" and peer.is_mapped
            ]
        for peer in peers:
            if peer.loss is None:
                self._probe(peer)
        with self._lock:  # no pull begins with a lost rank
            return [
                peer
                for peer in peers
                if peer.loss is not None
                and not peer.num_pulls
                and (peer.probe is None or peer.probe.is_over())
            ]

    def unmap(self, peers: Sequence[RankPeer]) -> None:
        """Give back what is mapped of dead ranks. None of their reads may be under way."""
        for peer in peers:
            peer.is_mapped = False
            peer.extents.release()
            peer.words.release()
            self._agent.remove_peer(peer.regions.agent_name)

    def _probe(self, peer: RankPeer) -> None:
        if peer.probe is not None and not peer.probe.is_over():
            return  # it stands still, and may go on
        try:
            peer.probe = self._agent.read(self._own_word, _FIRST, peer.words, _FIRST)
        except WorkerLost as error:
            peer.loss = str(error)
            return
        if peer.probe.failure is not None:
            peer.loss = f"{peer.regions.agent_name} is lost: {peer.probe.failure}"

    def _find(self, regions: pb.RankRegions) -> RankPeer:
        peer = self._known.get(regions.agent_name)
        if peer is None:
            peer = self._known[regions.agent_name] = self._meet(regions)
        if peer.loss is not None:
            raise WorkerLost(peer.loss)
        if peer.regions != regions:
            raise WorkerLost(f"{regions.agent_name} offers other regions than before")
        return peer

    def _meet(self, regions: pb.RankRegions) -> RankPeer:
        if regions.memory_kind not in ("DRAM", "VRAM"):
            raise ConfigError(f"KV pools in {regions.memory_kind!r} memory cannot be pulled")
        name = self._agent.add_peer(regions.agent_metadata)
        if name != regions.agent_name:
            raise WorkerLost(f"the metadata of {name} came as that of {regions.agent_name}")
        place = MemoryPlace(regions.memory_kind, regions.device_idx)
        extents = [
            (regions.mla_base, self._mla_bytes, regions.num_blocks),
            (regions.index_base, self._index_bytes, regions.num_blocks),
        ]
        words = [(regions.generation_base, WORD_BYTES, 1 + regions.num_blocks)]
        return RankPeer(
            regions,
            place,
            self._agent.peer_ranges(name, extents, place),
            self._agent.peer_ranges(name, words, HOST),
        )
