"""Which blocks sequences hold here, and what kv_index is told about them.

Joins the allocator, the chains that growing answers hash, and the journal. Used on one event loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared import block_hash, subjects
from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS
from shared.block_journal import BlockJournal
from shared.bus import Bus
from shared.engine.kv.allocator import Allocation, BlockAllocator
from shared.engine.kv.cache_events import Cleared, Removed, Stored


@dataclass
class Holding:
    """One sequence's blocks and what is written in them."""

    allocation: Allocation
    num_written: int  # leading tokens whose KV is here in every layer
    parent: bytes  # hash of the last full block
    tail: list[int] = field(default_factory=list)  # tokens after the last full block


class Blocks:
    """All blocks of one decode rank."""

    def __init__(self, worker: pb.WorkerRef, num_blocks: int, bus: Bus) -> None:
        self._allocator = BlockAllocator(num_blocks)
        self._journal = BlockJournal(worker)
        self._bus = bus
        self._changed = asyncio.Event()
        self._publishing = asyncio.Lock()

    def describe(self, heartbeat: pb.Heartbeat) -> None:
        """Say how far the block events are, and what is held there."""
        self._journal.describe(heartbeat)

    def hold(self, offer: pb.HandoffOffer, reserved_tokens: int) -> Holding | None:
        """Blocks for an offer's prompt and answer; None, nothing taken, if they are not there."""
        ids = block_hash.token_ids(offer.token_ids)
        hashes = block_hash.unpack(offer.block_hashes)
        allocation = self._allocator.allocate(
            len(ids), hashes, reserve_tokens=reserved_tokens - len(ids)
        )
        self._note()
        if allocation is None:
            return None
        parent = hashes[-1] if hashes else offer.hash_root
        return Holding(allocation, allocation.hit_tokens, parent, ids[len(hashes) * BLOCK_TOKENS :])

    def imported(self, holding: Holding, num_tokens: int) -> None:
        """The prompt's KV is here: its full blocks can be found."""
        holding.num_written = num_tokens
        self._publish(holding)

    def wrote(self, holding: Holding, token_ids: Sequence[int]) -> None:
        """A step has cached these further tokens; full blocks are hashed and can be found."""
        holding.num_written += len(token_ids)
        holding.tail += token_ids
        for block in block_hash.block_hashes(holding.parent, holding.tail):
            holding.allocation.hashes.append(block)
            holding.parent = block
            del holding.tail[:BLOCK_TOKENS]
            self._publish(holding)

    def give_back(self, holding: Holding) -> None:
        """The sequence is over and nothing writes to its blocks any more."""
        self._allocator.free(holding.allocation)

    async def announce(self) -> None:
        """For ever publish what changed, in order."""
        while True:
            await self._changed.wait()
            await self._flush()

    async def replay(self, request: pb.ReplayRequest) -> pb.ReplayReply:
        """Events that kv_index has missed. Raises WorkerLost if another life is meant."""
        while self._changed.is_set():
            await self._flush()
        return self._journal.replay(request)

    def check_integrity(self) -> None:
        """AssertionError if a block was lost. For tests and idle moments."""
        self._allocator.check_integrity()

    @property
    def num_free(self) -> int:
        """Blocks no sequence holds."""
        return self._allocator.num_free

    def _publish(self, holding: Holding) -> None:
        self._allocator.publish(holding.allocation, holding.num_written)
        self._note()

    def _note(self) -> None:
        for event in self._allocator.drain_events():
            match event:
                case Stored(hashes):
                    self._journal.stored(pb.TIER_HOST, hashes)
                case Removed(hashes):
                    self._journal.removed(pb.TIER_HOST, hashes)
                case Cleared():
                    self._journal.cleared()
            self._changed.set()

    async def _flush(self) -> None:
        async with self._publishing:
            self._changed.clear()
            batch = self._journal.commit()
            if batch is not None:
                await self._bus.publish(subjects.BLOCK_EVENTS, batch)
