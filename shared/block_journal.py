"""A worker's side of the block events: number them, keep the latest, replay or summarise them.

Every event is a change, no block is told twice: so an index can follow the digest of blocks that it
has no room for. Pure: the caller publishes what `commit` returns and answers replay requests with
`replay`. Prefill and decode share it, so that sequence numbers, gaps and snapshots mean one thing.
"""

from collections import deque
from collections.abc import Sequence

from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES, BlockHash, pack
from shared.errors import WorkerLost

# About two minutes at a batch per step of 30 ms; older gaps are healed by a snapshot.
NUM_KEPT_BATCHES = 4096


class BlockJournal:
    """All block events of one life of one worker. Used by one thread only."""

    def __init__(self, worker: pb.WorkerRef, num_kept_batches: int = NUM_KEPT_BATCHES) -> None:
        self._worker = worker
        self._pending: list[pb.BlockEvent] = []
        self._kept: deque[pb.BlockEvents] = deque(maxlen=num_kept_batches)
        self._held: dict[int, dict[BlockHash, None]] = {pb.TIER_DEVICE: {}, pb.TIER_HOST: {}}
        self._sequence = 0
        self._digests = dict.fromkeys(self._held, 0)
        self._digest = bytes(len(self._held) * HASH_BYTES)  # as of the last commit

    @property
    def sequence(self) -> int:
        """The last committed batch."""
        return self._sequence

    def describe(self, heartbeat: pb.Heartbeat) -> None:
        """Say how far the events are and what is held there, so that an index can compare."""
        heartbeat.event_sequence = self._sequence
        heartbeat.block_digest = self._digest

    def stored(self, tier: pb.Tier, hashes: Sequence[BlockHash]) -> None:
        """These blocks are now found in `tier`; told of those that were not before."""
        held = self._held[tier]
        new = [block_hash for block_hash in dict.fromkeys(hashes) if block_hash not in held]
        if new:
            held.update(dict.fromkeys(new))
            self._turn(tier, new)
            num_tokens = len(new) * BLOCK_TOKENS
            event = pb.BlocksStored(tier=tier, block_hashes=pack(new), num_tokens=num_tokens)
            self._pending.append(pb.BlockEvent(stored=event))

    def removed(self, tier: pb.Tier, hashes: Sequence[BlockHash]) -> None:
        """The last copy of these blocks has left `tier`; told of those that were there."""
        held = self._held[tier]
        gone = [block_hash for block_hash in dict.fromkeys(hashes) if block_hash in held]
        if gone:
            for block_hash in gone:
                del held[block_hash]
            self._turn(tier, gone)
            event = pb.BlocksRemoved(tier=tier, block_hashes=pack(gone))
            self._pending.append(pb.BlockEvent(removed=event))

    def cleared(self) -> None:
        """Nothing is found in any tier any more."""
        for tier, held in self._held.items():
            held.clear()
            self._digests[tier] = 0
        self._pending = [pb.BlockEvent(cleared=pb.BlocksCleared())]

    def commit(self) -> pb.BlockEvents | None:
        """The events since the last commit as the next batch; None if there are none."""
        if not self._pending:
            return None
        self._sequence += 1
        device, host = self._digests[pb.TIER_DEVICE], self._digests[pb.TIER_HOST]
        self._digest = device.to_bytes(HASH_BYTES, "little") + host.to_bytes(HASH_BYTES, "little")
        batch = pb.BlockEvents(worker=self._worker, sequence=self._sequence, events=self._pending)
        self._pending = []
        self._kept.append(batch)
        return batch

    def replay(self, request: pb.ReplayRequest) -> pb.ReplayReply:
        """The committed batches from the asked one on, or a snapshot if they are no longer kept.

        The caller commits and publishes first, or the snapshot would be ahead of its sequence.
        Raises WorkerLost if another life is meant.
        """
        if request.worker != self._worker:
            raise WorkerLost(f"worker {request.worker.worker_id} has begun another life")
        if self._pending:
            raise RuntimeError("commit and publish pending events before a replay")
        oldest = self._kept[0].sequence if self._kept else self._sequence + 1
        if request.from_sequence >= oldest:
            wanted = [batch for batch in self._kept if batch.sequence >= request.from_sequence]
            return pb.ReplayReply(batches=wanted)
        snapshot = pb.BlockSnapshot(
            sequence=self._sequence,
            device_block_hashes=pack(self._held[pb.TIER_DEVICE]),
            host_block_hashes=pack(self._held[pb.TIER_HOST]),
        )
        return pb.ReplayReply(snapshot=snapshot)

    def _turn(self, tier: pb.Tier, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            self._digests[tier] ^= int.from_bytes(block_hash, "little")
