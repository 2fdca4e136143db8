"""A worker as kv_index sees it: block events, heartbeats, replays; no engine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.kv_index.events import Life
from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import BlockHash
from shared.block_journal import BlockJournal
from shared.bus import Bus


class FakeWorker:
    """Publishes what its journal says, or loses it on purpose."""

    def __init__(self, bus: Bus, life: Life, num_kept_batches: int = 100) -> None:
        self.life = life
        self.replays: list[int] = []
        self.digest: bytes | None = None  # what to say instead of the truth
        self.sequence: int | None = None  # the same
        self._bus = bus
        self._ref = pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch)
        self._journal = BlockJournal(self._ref, num_kept_batches)

    async def store(
        self, hashes: Sequence[BlockHash], tier: pb.Tier = pb.TIER_DEVICE, *, is_lost: bool = False
    ) -> None:
        self._journal.stored(tier, hashes)
        await self._publish(is_lost)

    async def remove(
        self, hashes: Sequence[BlockHash], tier: pb.Tier = pb.TIER_DEVICE, *, is_lost: bool = False
    ) -> None:
        self._journal.removed(tier, hashes)
        await self._publish(is_lost)

    async def beat(
        self,
        state: pb.ServiceState = pb.SERVICE_STATE_READY,
        *,
        block_tokens: int = 64,
        num_running: int = 0,
    ) -> None:
        heartbeat = pb.Heartbeat(
            worker=self._ref,
            role=pb.ROLE_PREFILL,
            state=state,
            layout=pb.KvLayout(block_tokens=block_tokens),
            load=pb.Load(num_running=num_running),
        )
        self._journal.describe(heartbeat)
        if self.digest is not None:
            heartbeat.block_digest = self.digest
        if self.sequence is not None:
            heartbeat.event_sequence = self.sequence
        await self._bus.publish(subjects.HEARTBEAT, heartbeat)

    async def forget(self, hashes: Sequence[BlockHash]) -> None:
        """A batch that does not say what it should: the engine drops blocks in silence."""
        self._journal.removed(pb.TIER_DEVICE, hashes)
        batch = self._journal.commit()
        assert batch is not None
        del batch.events[:]
        await self._bus.publish(subjects.BLOCK_EVENTS, batch)

    @asynccontextmanager
    async def answering(self) -> AsyncIterator["FakeWorker"]:
        worker_id = self.life.worker_id
        async with self._bus.answer(subjects.REPLAY, self._replay, worker=worker_id):
            yield self

    async def _publish(self, is_lost: bool) -> None:
        batch = self._journal.commit()
        if batch is not None and not is_lost:
            await self._bus.publish(subjects.BLOCK_EVENTS, batch)

    async def _replay(self, request: pb.ReplayRequest) -> pb.ReplayReply:
        self.replays.append(request.from_sequence)
        return self._journal.replay(request)
