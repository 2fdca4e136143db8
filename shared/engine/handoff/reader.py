"""Reads blocks and generation words of prefill ranks into staging slots, each within a deadline.

Knows NIXL agents, descriptors and lanes; knows nothing of tokens or of what the words should say.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared import farspan_pb2 as pb
from shared.engine.handoff.agent import NixlAgent, Read
from shared.engine.handoff.peers import WORD_BYTES, RankPeer, RankPeers
from shared.engine.handoff.staging import Lane, allocate_slots
from shared.engine.kv.layout import IntArray
from shared.errors import WorkerLost

_POLL_S = 0.0002  # 1 MiB over TCP takes 1.7 ms

Post = tuple[RankPeer, IntArray, IntArray]  # from whom, own descriptors, the peer's descriptors


@dataclass(frozen=True)
class RankShare:
    """Blocks of one rank and the slots they are read into."""

    peer: RankPeer
    block_ids: IntArray
    slots: IntArray
    epoch_slot: int  # where the rank's epoch word is read into


@dataclass(frozen=True)
class ReadCounts:
    """What reads have moved, generation words included."""

    num_bytes: int = 0
    num_descriptors: int = 0

    def __add__(self, other: "ReadCounts") -> "ReadCounts":
        return ReadCounts(
            self.num_bytes + other.num_bytes, self.num_descriptors + other.num_descriptors
        )


class BlockReader:
    """One decode worker's agent, staging memory and peers; safe to use from several threads."""

    def __init__(self, owner: str, layout: pb.KvLayout, num_slots: int) -> None:
        self.slots = allocate_slots(layout, num_slots)
        self._agent = NixlAgent(owner)
        for tensor in self.slots.tensors:
            self._agent.register(tensor)
        self._own = self._agent.own_ranges(
            [(tensor.data_ptr(), tensor[0].nbytes, len(tensor)) for tensor in self.slots.tensors]
        )
        mla_bytes, index_bytes = self.slots.mla[0].nbytes, self.slots.index[0].nbytes
        self._block_bytes = mla_bytes + index_bytes
        self.peers = RankPeers(self._agent, mla_bytes, index_bytes)
        self._counts_lock = threading.Lock()
        self._counts = ReadCounts()

    @property
    def counts(self) -> ReadCounts:
        """Everything posted since the start."""
        with self._counts_lock:
            return self._counts

    def read_blocks(self, lane: Lane, shares: Sequence[RankShare], deadline: float) -> ReadCounts:
        """Fill the shares' slots with their blocks' rows and index pages. Raises WorkerLost."""
        num_blocks = sum(len(share.slots) for share in shares)
        posts = (
            (share.peer, self.slots.extent_ids(share.slots), share.peer.extent_ids(share.block_ids))
            for share in shares
        )
        self._read(lane, posts, deadline)
        return self._count(num_blocks * self._block_bytes, 2 * num_blocks)

    def read_words(self, lane: Lane, shares: Sequence[RankShare], deadline: float) -> ReadCounts:
        """Fill the shares' epoch and generation slots. Raises WorkerLost."""
        num_words = sum(1 + len(share.slots) for share in shares)
        posts = (
            (
                share.peer,
                self.slots.word_ids(share.epoch_slot, share.slots),
                share.peer.word_ids(share.block_ids),
            )
            for share in shares
        )
        self._read(lane, posts, deadline)
        return self._count(num_words * WORD_BYTES, num_words)

    def _read(self, lane: Lane, posts: Iterable[Post], deadline: float) -> None:
        posted: list[tuple[RankPeer, Read]] = []
        for peer, own_ids, peer_ids in posts:
            if peer.loss is not None:  # another pull has just seen it die
                raise WorkerLost(peer.loss)
            read = self._agent.read(self._own, own_ids, peer.descriptors, peer_ids)
            lane.reads.append(read)
            posted.append((peer, read))
        while lane.has_unfinished_reads():
            if time.monotonic() > deadline:
                raise WorkerLost(f"{_names(posted)} did not serve a read in time")
            time.sleep(_POLL_S)
        for peer, read in posted:
            if read.failure is not None:
                peer.loss = f"{peer.regions.agent_name} is lost: {read.failure}"
                raise WorkerLost(peer.loss)

    def _count(self, num_bytes: int, num_descriptors: int) -> ReadCounts:
        counts = ReadCounts(num_bytes, num_descriptors)
        with self._counts_lock:
            self._counts += counts
        return counts


def _names(posted: Iterable[tuple[RankPeer, Read]]) -> str:
    return ", ".join(peer.regions.agent_name for peer, read in posted if not read.is_over())
