"""Who owns which block: free list, reference counts, prefix cache, eviction, generations.

Plain Python on plain data; knows no tensors and no bus. A block id covers `64 * ranks` tokens (an
effective block), but content is addressed, and found, in 64-token steps. Owned by the step thread.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NewType

from shared.block_hash import BLOCK_TOKENS, BlockHash
from shared.engine.kv.cache_events import CacheEvent, Cleared, Removed, Stored
from shared.engine.step import BlockCopy

BlockId = NewType("BlockId", int)


@dataclass(eq=False)
class Allocation:
    """One sequence's blocks. `hashes` grows as its owner fills further 64-token blocks."""

    block_ids: list[BlockId]
    generations: list[int]
    hit_tokens: int
    num_shared_blocks: int  # leading blocks found in the cache; the rest were handed out anew
    copies: list[BlockCopy]  # to be done before the first step: a hit that ends inside a block
    hashes: list[BlockHash]
    num_published: int = 0  # leading 64-token blocks that can be found, or were hits
    is_findable: bool = True  # False after a clear: what it holds belongs to the forgotten content

    @property
    def new_block_ids(self) -> list[BlockId]:
        """The blocks that held something else, or nothing, before."""
        return self.block_ids[self.num_shared_blocks :]


@dataclass
class _Block:
    generation: int = 0
    references: int = 0
    # Its findable 64-token blocks, from its start.
    hashes: list[BlockHash] = field(default_factory=list)


@dataclass(frozen=True)
class _Hit:
    blocks: list[BlockId]  # whole effective blocks
    source: BlockId | None = None  # holds the beginning of the next one
    source_tokens: int = 0


def num_usable_blocks(prompt_tokens: int, hashes: Sequence[BlockHash]) -> int:
    """64-token blocks that may be hits: of a prompt's last one a token is computed in any case."""
    return min(len(hashes), (prompt_tokens - 1) // BLOCK_TOKENS)


class BlockAllocator:
    """Blocks for sequences, shared by content.

    A block is free, referenced, or cached: unreferenced, findable, and reusable at any time. Cached
    blocks are taken least recently used first, and a sequence gives its blocks back tail first, so
    a chain always loses its tail before its head: presence along a chain is monotone.
    """

    def __init__(
        self, num_blocks: int, *, ranks: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._ranks = ranks
        self._clock = clock
        self._free = deque(BlockId(block) for block in range(num_blocks))
        self._cached: OrderedDict[BlockId, float] = OrderedDict()  # since when; oldest first
        self._copies_of: dict[BlockHash, list[BlockId]] = {}
        self._live: dict[Allocation, list[BlockId]] = {}  # and the copy sources each one pins
        self._events: list[CacheEvent] = []

    @property
    def block_tokens(self) -> int:
        """Tokens one block id covers."""
        return BLOCK_TOKENS * self._ranks

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks an allocation can get: the free ones and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_empty(self) -> int:
        """Those of the free blocks that hold nothing."""
        return len(self._free)

    @property
    def eviction_age_s(self) -> float:
        """For how long the cached block that is taken first was not used; 0 if none is cached."""
        since_s = next(iter(self._cached.values()), None)
        return 0.0 if since_s is None else self._clock() - since_s

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks num_tokens need."""
        return -(-num_tokens // self.block_tokens)

    def can_find(self, block_hash: BlockHash) -> bool:
        """Whether a block with this content is there."""
        return block_hash in self._copies_of

    def hit_tokens(self, prompt_tokens: int, hashes: Sequence[BlockHash]) -> int:
        """The prefix hit an allocation would get now."""
        hit = self._match(prompt_tokens, hashes)
        return len(hit.blocks) * self.block_tokens + hit.source_tokens

    def allocate(
        self,
        prompt_tokens: int,
        hashes: Sequence[BlockHash],
        *,
        reserve_tokens: int = 0,
        may_hit: bool = True,
    ) -> Allocation | None:
        """Blocks for a prompt and reserve_tokens more; None, nothing taken, if they are not there.

        The prompt is not empty, and the hit never covers its last token, whose output is wanted;
        where every token's is, nothing may hit.
        Copy sources stay pinned until the first publish, or free.
        """
        num_blocks = self.blocks_for(prompt_tokens + reserve_tokens)
        hit = self._match(prompt_tokens, hashes if may_hit else [])
        num_new = num_blocks - len(hit.blocks)
        pinned = [hit.source] if hit.source is not None else []
        if num_new > self._available_beside([*hit.blocks, *pinned]):
            # The pinned source may be the very block that is missing: do without it.
            hit, pinned = _Hit(hit.blocks), []
            if num_new > self._available_beside(hit.blocks):
                return None
        for block in [*hit.blocks, *pinned]:
            self._reference(block)
        new_blocks = [self._hand_out() for _ in range(num_new)]
        block_ids = [*hit.blocks, *new_blocks]
        allocation = Allocation(
            block_ids=block_ids,
            generations=[self._blocks[block].generation for block in block_ids],
            hit_tokens=len(hit.blocks) * self.block_tokens + hit.source_tokens,
            num_shared_blocks=len(hit.blocks),
            copies=[BlockCopy(source, new_blocks[0]) for source in pinned],
            hashes=list(hashes),
            num_published=len(hit.blocks) * self._ranks,
        )
        self._live[allocation] = pinned
        return allocation

    def grow(self, allocation: Allocation, num_tokens: int) -> bool:
        """Add blocks until num_tokens fit; False, nothing taken, if they are not there."""
        num_new = self.blocks_for(num_tokens) - len(allocation.block_ids)
        if num_new > self.num_free:
            return False
        for _ in range(num_new):
            block = self._hand_out()
            allocation.block_ids.append(block)
            allocation.generations.append(self._blocks[block].generation)
        return True

    def publish(self, allocation: Allocation, num_tokens: int) -> None:
        """The first num_tokens are computed in every layer: their full blocks can be found."""
        self._unpin(allocation)
        if not allocation.is_findable:
            return
        num_computed = min(num_tokens // BLOCK_TOKENS, len(allocation.hashes))
        stored = []
        for place in range(allocation.num_published, num_computed):
            block, block_hash = allocation.block_ids[place // self._ranks], allocation.hashes[place]
            copies = self._copies_of.setdefault(block_hash, [])
            if not copies:
                stored.append(block_hash)
            copies.append(block)
            self._blocks[block].hashes.append(block_hash)
        allocation.num_published = max(allocation.num_published, num_computed)
        if stored:
            self._events.append(Stored(tuple(stored)))

    def free(self, allocation: Allocation) -> None:
        """Give the blocks back; those that can be found stay cached until their room is needed."""
        self._unpin(allocation)
        del self._live[allocation]
        for block in reversed(allocation.block_ids):
            self._dereference(block)

    def clear(self) -> None:
        """Forget all content; sequences keep their blocks."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._copies_of.clear()
        for block in self._blocks:
            block.hashes.clear()
        for allocation in self._live:
            allocation.is_findable = False
        self._events.append(Cleared())

    def drain_events(self) -> list[CacheEvent]:
        """What changed for those who search from outside, in order, since the last call."""
        events, self._events = self._events, []
        merged: list[CacheEvent] = []
        for event in events:
            match (merged[-1] if merged else None), event:
                case Stored(before), Stored(hashes):
                    merged[-1] = Stored(before + hashes)
                case Removed(before), Removed(hashes):
                    merged[-1] = Removed(before + hashes)
                case _:
                    merged.append(event)
        return merged

    def cached_hashes(self) -> list[BlockHash]:
        """All hashes that can be found now."""
        return list(self._copies_of)

    def check_integrity(self) -> None:
        """Every block has exactly one state and every reference an owner; AssertionError if not."""
        held = Counter(b for a, pinned in self._live.items() for b in [*a.block_ids, *pinned])
        counts = {BlockId(b): block.references for b, block in enumerate(self._blocks)}
        assert all(counts[block] == held[block] for block in counts), "a reference without an owner"
        states = [*self._free, *self._cached, *held]
        assert sorted(states) == list(range(self.num_blocks)), "blocks were lost or owned twice"
        assert all(self._blocks[block].hashes for block in self._cached), "cached without content"
        assert not any(self._blocks[block].hashes for block in self._free), "free with content"
        pairs = Counter((h, b) for h, copies in self._copies_of.items() for b in copies)
        found = Counter(
            (h, BlockId(b)) for b, block in enumerate(self._blocks) for h in block.hashes
        )
        assert pairs == found, "the hash table and the blocks disagree"

    def _match(self, prompt_tokens: int, hashes: Sequence[BlockHash]) -> _Hit:
        limit = num_usable_blocks(prompt_tokens, hashes)
        matched = 0
        while matched < limit and hashes[matched] in self._copies_of:
            matched += 1
        # A hash stands for all before it: a block that holds it holds the block's beginning too.
        whole, rest = divmod(matched, self._ranks)
        ends = range(self._ranks - 1, whole * self._ranks, self._ranks)
        blocks = [self._copies_of[hashes[end]][0] for end in ends]
        if rest == 0:
            return _Hit(blocks)
        return _Hit(blocks, self._copies_of[hashes[matched - 1]][0], rest * BLOCK_TOKENS)

    def _available_beside(self, wanted: list[BlockId]) -> int:
        return self.num_free - len({block for block in wanted if block in self._cached})

    def _hand_out(self) -> BlockId:
        if not self._free:
            self._evict()
        block = self._free.popleft()
        self._blocks[block].references = 1
        self._blocks[block].generation += 1
        return block

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        removed = []
        for block_hash in reversed(self._blocks[block].hashes):
            copies = self._copies_of[block_hash]
            copies.remove(block)
            if not copies:
                del self._copies_of[block_hash]
                removed.append(block_hash)
        self._blocks[block].hashes.clear()
        self._free.append(block)
        if removed:
            self._events.append(Removed(tuple(removed)))

    def _reference(self, block: BlockId) -> None:
        self._cached.pop(block, None)
        self._blocks[block].references += 1

    def _dereference(self, block: BlockId) -> None:
        state = self._blocks[block]
        state.references -= 1
        if state.references > 0:
            return
        if state.hashes:
            self._cached[block] = self._clock()
        else:
            self._free.append(block)

    def _unpin(self, allocation: Allocation) -> None:
        for block in self._live[allocation]:
            self._dereference(block)
        self._live[allocation] = []
