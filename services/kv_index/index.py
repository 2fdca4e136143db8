"""Which worker holds which block, in memory: apply events, answer longest prefixes.

Knows worker lives, tiers and sequence numbers; knows no Redis, NATS or clock. Only a worker's
current life has holdings, so a restart or a clear drops everything in one step and nothing old is
ever found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.kv_index import events
from services.kv_index.events import DEVICE_BIT, GONE, Cleared, Life
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash

_NUM_PROBES = 16  # beside the 15 of the search; together 2 us of a lookup that may cover 16,384


@dataclass(frozen=True)
class Delta:
    """What one step changed at a life: the unit in which the durable copy follows."""

    life: Life
    previous: int | None  # the sequence it builds on; None: `blocks` is all there is
    sequence: int
    blocks: Mapping[BlockHash, int]  # tier bits, GONE = no longer held


class Hit(NamedTuple):
    """A life that holds a prompt's first `num_blocks` blocks, the slowest of them in `tier`."""

    life: Life
    num_blocks: int
    tier: pb.Tier


@dataclass
class _Holdings:
    """What one life holds, and how far its events have been followed."""

    life: Life
    sequence: int = 0  # the last batch applied
    announced: int = 0  # batches up to here exist, so what is missing of them is lost
    claimed: int = 0  # what the last heartbeat said
    blocks: dict[BlockHash, int] = field(default_factory=dict)  # tier bits, never GONE


class Index:
    """The blocks of every worker's current life."""

    def __init__(self) -> None:
        self._workers: dict[str, _Holdings] = {}

    @property
    def sequences(self) -> dict[Life, int]:
        """The last applied batch of every worker's current life, 0 before the first."""
        return {holdings.life: holdings.sequence for holdings in self._workers.values()}

    @property
    def num_blocks(self) -> int:
        """Blocks held, counted once for each worker."""
        return sum(len(holdings.blocks) for holdings in self._workers.values())

    def apply(self, batch: pb.BlockEvents) -> Delta | None:
        """Follow the next batch; None if it is a duplicate, of a past life, or after a gap.

        After a gap `first_missing` says what to ask for. Raises BadRequest, changing nothing.
        """
        life, changes = events.life_of(batch.worker), events.changes(batch)
        holdings = self._current(life)
        if holdings is None:
            return None
        holdings.announced = max(holdings.announced, batch.sequence)
        if batch.sequence != holdings.sequence + 1:
            return None
        previous: int | None = holdings.sequence
        touched: dict[BlockHash, int] = {}
        for change in changes:
            if isinstance(change, Cleared):
                holdings.blocks, touched, previous = {}, {}, None
                continue
            for block_hash in change.hashes:
                bits = touched.get(block_hash, holdings.blocks.get(block_hash, GONE))
                touched[block_hash] = bits & change.keep_bits | change.set_bits
        _merge(holdings.blocks, touched)
        holdings.sequence = batch.sequence
        return Delta(life, previous, batch.sequence, touched)

    def heartbeat(self, life: Life, event_sequence: int) -> Delta | None:
        """Note how far a worker says it is; the delta is given if its life begins with this.

        Events and heartbeats arrive on separate subscriptions, so a heartbeat may be ahead for a
        moment. What the one before it claimed and has still not arrived is lost.
        """
        before = self._workers.get(life.worker_id)
        holdings = self._current(life)
        if holdings is None:
            return None
        holdings.announced = max(holdings.announced, holdings.claimed)
        holdings.claimed = event_sequence
        return self.whole(life) if holdings is not before else None

    def first_missing(self, life: Life) -> int | None:
        """The sequence from which `life` must replay; None if nothing is known to be lost."""
        holdings = self._workers.get(life.worker_id)
        if holdings is None or holdings.life != life or holdings.sequence >= holdings.announced:
            return None
        return holdings.sequence + 1

    def restore(self, life: Life, sequence: int, blocks: Mapping[BlockHash, int]) -> Delta | None:
        """Take over a whole state; None if `life` is over or has been followed further."""
        holdings = self._current(life)
        if holdings is None or sequence < holdings.sequence:
            return None
        holdings.blocks = {block_hash: bits for block_hash, bits in blocks.items() if bits != GONE}
        holdings.sequence = sequence
        return self.whole(life)

    def whole(self, life: Life) -> Delta | None:
        """All that a life holds as one delta; None if it is over."""
        holdings = self._workers.get(life.worker_id)
        if holdings is None or holdings.life != life:
            return None
        return Delta(life, None, holdings.sequence, dict(holdings.blocks))

    def retire(self, life: Life) -> bool:
        """Forget a worker; False if it is not known or has begun another life."""
        holdings = self._workers.get(life.worker_id)
        if holdings is None or holdings.life != life:
            return False
        del self._workers[life.worker_id]
        return True

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> list[Hit]:
        """Every worker that holds at least the first block, and how far it goes."""
        hits = []
        for holdings in self._workers.values():
            num_blocks = _prefix_len(hashes, holdings.blocks.__contains__)
            if num_blocks:
                hits.append(Hit(holdings.life, num_blocks, _tier(hashes[:num_blocks], holdings)))
        return sorted(hits)

    def _current(self, life: Life) -> _Holdings | None:
        """The holdings of `life`, empty at first; None if a later life has begun."""
        holdings = self._workers.get(life.worker_id)
        if holdings is None or holdings.life.epoch < life.epoch:
            holdings = self._workers[life.worker_id] = _Holdings(life)
        return holdings if holdings.life == life else None


def _merge(blocks: dict[BlockHash, int], touched: Mapping[BlockHash, int]) -> None:
    for block_hash, bits in touched.items():
        if bits == GONE:
            blocks.pop(block_hash, None)
        else:
            blocks[block_hash] = bits


def _tier(held: Sequence[BlockHash], holdings: _Holdings) -> pb.Tier:
    """The slowest tier that a prefix which is held touches."""

    def on_device(block_hash: BlockHash) -> bool:
        return bool(holdings.blocks.get(block_hash, GONE) & DEVICE_BIT)

    return pb.TIER_DEVICE if _prefix_len(held, on_device) == len(held) else pb.TIER_HOST


def _prefix_len(hashes: Sequence[BlockHash], is_held: Callable[[BlockHash], bool]) -> int:
    """How many leading hashes are held.

    Workers evict a chain's tail before its head, so presence is monotone and a binary search finds
    its end. Probes inside the result catch a worker that broke the rule; then every block is asked.
    """
    if not hashes or not is_held(hashes[0]):
        return 0
    low, high = 1, len(hashes) + 1  # hashes[low - 1] is held, hashes[high - 1] is not
    while high - low > 1:
        middle = (low + high) // 2
        if is_held(hashes[middle - 1]):
            low = middle
        else:
            high = middle
    step = max(1, low // _NUM_PROBES)
    if all(is_held(hashes[probe]) for probe in range(0, low, step)):
        return low
    return next(count for count, block_hash in enumerate(hashes) if not is_held(block_hash))
