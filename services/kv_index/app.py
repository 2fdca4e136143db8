"""kv_index wired up: block events and heartbeats in over NATS, prefix queries out over gRPC.

Queries are answered from memory whatever Redis or NATS do. Lost events are asked for again; a
worker that no longer has them answers with a snapshot.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from services.kv_index import events
from services.kv_index.config import KvIndexConfig
from services.kv_index.events import Life
from services.kv_index.index import Index
from services.kv_index.mirror import Mirror
from services.kv_index.store import Store, StoreAway
from shared import bus, lifecycle, prefix_rpc, subjects, tasks, telemetry
from shared import farspan_pb2 as pb
from shared.bus import Bus
from shared.errors import ConfigError, FarspanError

logger = logging.getLogger(__name__)

_REPLAY_TIMEOUT_S = 5.0  # a snapshot of a million blocks is 16 MB
_SWEEP_S = 1.0
_ANY_SEQUENCE = 0  # asks for a snapshot


class KvIndex:
    """The handlers around one index. Used on one event loop."""

    def __init__(self, bus: Bus, index: Index, mirror: Mirror) -> None:
        self._bus = bus
        self._index = index
        self._mirror = mirror
        self._repairs: dict[Life, asyncio.Task[None]] = {}
        self._heard_s: dict[Life, float] = {}
        self._summary = "starting"

    def state(self) -> tuple[bool, str]:
        """Readiness and its reason; called on the probe's thread, so it reads no growing dict."""
        reason = self._summary
        if self._mirror.away_reason:
            reason += f"; Redis is away, serving from memory: {self._mirror.away_reason}"
        if not self._bus.is_connected:
            return False, f"NATS is away, events may be missed; {reason}"
        return True, reason

    async def on_events(self, batch: pb.BlockEvents) -> None:
        """Follow a worker's next batch."""
        self._mirror.append(self._index.apply(batch))
        self._repair_if_needed(events.life_of(batch.worker))

    async def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        """Learn of new lives, of lost tails and of workers that stop."""
        life = events.life_of(heartbeat.worker)
        if heartbeat.state == pb.SERVICE_STATE_STOPPED:
            self._retire(life)
            return
        self._heard_s[life] = time.monotonic()
        self._mirror.append(self._index.heartbeat(life, heartbeat.event_sequence))
        self._repair_if_needed(life)

    def longest_prefix(self, query: pb.PrefixQuery) -> pb.PrefixHits:
        """Who holds how much of a prompt. Raises BadRequest."""
        hashes = events.parse_hashes(query.block_hashes)
        with telemetry.span("kv_index.longest_prefix", num_blocks=len(hashes)) as span:
            hits = self._index.longest_prefix(hashes)
            span.set(
                num_workers=len(hits),
                hit_blocks=max((hit.num_blocks for hit in hits), default=0),
            )
        return pb.PrefixHits(
            hits=[
                pb.PrefixHit(worker=_ref(hit.life), tier=hit.tier, num_blocks=hit.num_blocks)
                for hit in hits
            ]
        )

    async def sweep(self, forget_after_s: float) -> None:
        """For ever forget workers that fell silent; silence while NATS is away does not count."""
        while True:
            now_s = time.monotonic()
            lives = set(self._index.sequences)
            self._summary = f"{len(lives)} workers, {self._index.num_blocks} blocks"
            self._heard_s = {
                life: self._heard_s.get(life, now_s) if self._bus.is_connected else now_s
                for life in lives
            }
            for life, heard_s in list(self._heard_s.items()):
                if now_s - heard_s > forget_after_s:
                    logger.info("forgetting worker %s: silent", life.worker_id)
                    self._retire(life)
            await asyncio.sleep(_SWEEP_S)

    async def stop_repairs(self) -> None:
        """Give up running repairs; the next process starts them again."""
        await tasks.finish(list(self._repairs.values()), grace_s=0)

    def _retire(self, life: Life) -> None:
        if self._index.retire(life):
            self._mirror.retire(life)

    def _repair_if_needed(self, life: Life) -> None:
        if life not in self._repairs and self._index.first_missing(life) is not None:
            task = asyncio.create_task(self._repair(life))
            self._repairs[life] = task
            task.add_done_callback(lambda _: self._repairs.pop(life, None))

    async def _repair(self, life: Life) -> None:
        """Ask for what is missing until nothing is. On failure the next heartbeat begins anew."""
        try:
            while (first := self._index.first_missing(life)) is not None:
                await self._ask(life, first)
                if self._index.first_missing(life) == first:
                    await self._ask(life, _ANY_SEQUENCE)
                    if self._index.first_missing(life) == first:
                        logger.error("worker %s does not replay %d", life.worker_id, first)
                        return
        except FarspanError as error:
            logger.warning("no replay from worker %s: %s", life.worker_id, error)

    async def _ask(self, life: Life, from_sequence: int) -> None:
        request = pb.ReplayRequest(worker=_ref(life), from_sequence=from_sequence)
        reply = await self._bus.request(
            subjects.REPLAY, request, timeout_s=_REPLAY_TIMEOUT_S, worker=life.worker_id
        )
        logger.info(
            "worker %s from %d: %s",
            life.worker_id,
            from_sequence,
            "snapshot" if reply.HasField("snapshot") else f"{len(reply.batches)} batches replayed",
        )
        if reply.HasField("snapshot"):
            blocks = events.snapshot_blocks(reply.snapshot)
            self._mirror.append(self._index.restore(life, reply.snapshot.sequence, blocks))
        for batch in reply.batches:
            self._mirror.append(self._index.apply(batch))


@asynccontextmanager
async def serve(config: KvIndexConfig) -> AsyncIterator[int]:
    """kv_index at work inside the block; yields the port of its prefix queries.

    Raises ConfigError when NATS or Redis is missing at the start.
    """
    index, store = Index(), Store(config.redis_url)
    mirror = Mirror(index, store, check_interval_s=config.redis_check_interval_s)
    async with (
        aclosing(store),
        bus.connect(config.nats_url, "kv_index") as link,
    ):
        await _load(index, store)
        service = KvIndex(link, index, mirror)
        async with (
            tasks.background(mirror.run(), service.sweep(config.forget_after_s)),
            lifecycle.health(config.health_host, config.health_port, service.state),
            prefix_rpc.serve(config.grpc_address, service.longest_prefix) as port,
            link.listen(subjects.BLOCK_EVENTS, service.on_events),
            link.listen(subjects.HEARTBEAT, service.on_heartbeat),
        ):
            try:
                yield port
            finally:
                await service.stop_repairs()
        await _flush(mirror)


async def _load(index: Index, store: Store) -> None:
    """Start with what the last process knew."""
    try:
        lives = await store.load()
    except StoreAway as error:
        raise ConfigError(f"no Redis at {store.place}: {error}") from error
    for life in lives:
        index.restore(life.life, life.sequence, life.blocks)
    logger.info("loaded %d blocks of %d workers", index.num_blocks, len(lives))


async def _flush(mirror: Mirror) -> None:
    """Leave the copy as good as it can be; the next process asks workers for the rest."""
    try:
        await mirror.write()
    except StoreAway as error:
        logger.warning("the copy in Redis is behind: %s", error)


def _ref(life: Life) -> pb.WorkerRef:
    return pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch)
