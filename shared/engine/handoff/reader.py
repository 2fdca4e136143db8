"""Reads blocks and generation words of prefill ranks into staging slots, each within a deadline.

Blocks land in the memory that the slots are, words always on the host.

Knows NIXL agents, descriptors and lanes; knows nothing of tokens or of what the words should say.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared.engine.handoff.agent import HOST, MemoryPlace, NixlAgent, Read, place_of
from shared.engine.handoff.peers import WORD_BYTES, RankPeer
from shared.engine.handoff.staging import Lane, Slots
from shared.engine.kv.layout import IntArray
from shared.errors import WorkerLost

_POLL_S = 0.0002  # 1 MiB over TCP takes 1.7 ms


@dataclass(frozen=True)
class _Post:
    """A read to be posted: descriptors of two lists, pairwise."""

    peer: RankPeer
    own: Any
    own_ids: IntArray
    theirs: Any
    their_ids: IntArray


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
    """Reads into one memory's slots; safe to use from several threads."""

    def __init__(self, agent: NixlAgent, slots: Slots) -> None:
        self.slots = slots
        self._agent = agent
        self._extents = self._registered(slots.extents, place_of(slots.mla))
        self._words = self._registered(slots.words, HOST)
        self._block_bytes = slots.mla[0].nbytes + slots.index[0].nbytes
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
            _Post(
                share.peer,
                self._extents,
                self.slots.extent_ids(share.slots),
                share.peer.extents,
                share.peer.extent_ids(share.block_ids),
            )
            for share in shares
        )
        self._read(lane, posts, deadline)
        return self._count(num_blocks * self._block_bytes, 2 * num_blocks)

    def read_words(self, lane: Lane, shares: Sequence[RankShare], deadline: float) -> ReadCounts:
        """Fill the shares' epoch and generation slots. Raises WorkerLost."""
        num_words = sum(1 + len(share.slots) for share in shares)
        posts = (
            _Post(
                share.peer,
                self._words,
                self.slots.word_ids(share.epoch_slot, share.slots),
                share.peer.words,
                share.peer.word_ids(share.block_ids),
            )
            for share in shares
        )
        self._read(lane, posts, deadline)
        return self._count(num_words * WORD_BYTES, num_words)

    def _registered(self, memories: Sequence[torch.Tensor], place: MemoryPlace) -> Any:
        for memory in memories:
            self._agent.register(memory)
        ranges = [(memory.data_ptr(), memory[0].nbytes, len(memory)) for memory in memories]
        return self._agent.own_ranges(ranges, place)

    def _read(self, lane: Lane, posts: Iterable[_Post], deadline: float) -> None:
        posted: list[tuple[RankPeer, Read]] = []
        for post in posts:
            if post.peer.loss is not None:  # another pull has just seen it die
                raise WorkerLost(post.peer.loss)
            read = self._agent.read(post.own, post.own_ids, post.theirs, post.their_ids)
            lane.reads.append(read)
            posted.append((post.peer, read))
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
