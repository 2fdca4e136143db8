"""kv_index wired up: block events and heartbeats in over NATS, prefix queries out over gRPC.

Queries are answered from memory whatever Redis or NATS do.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

from services.kv_index import events
from services.kv_index.config import KvIndexConfig
from services.kv_index.events import End, Life
from services.kv_index.index import Index
from services.kv_index.mirror import Mirror
from services.kv_index.repair import Repairs
from services.kv_index.store import Store, StoreAway, StoreRefused
from services.kv_index.watch import Watch
from shared import bus, lifecycle, prefix_rpc, subjects, tasks, telemetry
from shared import farspan_pb2 as pb
from shared.block_hash import HASH_BYTES
from shared.bus import Bus
from shared.errors import BadRequest, ConfigError

logger = logging.getLogger(__name__)

_SWEEP_S = 1.0


class KvIndex:
    """The handlers around one index. Used on one event loop."""

    def __init__(self, bus: Bus, index: Index, mirror: Mirror, watch: Watch) -> None:
        self._bus = bus
        self._index = index
        self._mirror = mirror
        self._watch = watch
        self._repairs = Repairs(bus, index, mirror, self._refuse)
        # Of those refused, whoever has been heard of lately: who is gone is no alarm.
        self._heard_s = dict.fromkeys(filter(index.is_refused, index.over), time.monotonic())
        self._num_lookups = 0
        self._num_late = 0
        self._num_refused = 0
        self._summary = "starting"
        self._metrics: Mapping[str, float] = {}

    def state(self) -> tuple[bool, str]:
        """Readiness and its reason; called on the probe's thread, so it reads no growing dict."""
        reason = self._summary
        if self._mirror.away_reason:
            reason += f"; Redis is away, serving from memory: {self._mirror.away_reason}"
        if not self._bus.is_connected:
            return False, f"NATS is away, events may be missed; {reason}"
        return True, reason

    def metrics(self) -> Mapping[str, float]:
        """What Prometheus reads, at most a second old; called on the probe's thread."""
        return self._metrics

    async def on_events(self, batch: pb.BlockEvents) -> None:
        """Follow a worker's next batch."""
        life = events.life_of(batch.worker)
        if self._is_ahead(life) or self._is_left_out(life):
            return
        try:
            self._mirror.append(self._index.apply(batch))
        except BadRequest as error:
            self._refuse(life, error)
            return
        self._repairs.begin_if_needed(life)

    async def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        """Learn of new lives, of lost tails, of drift, and of workers that stop."""
        life = events.life_of(heartbeat.worker)
        if self._is_ahead(life):
            return
        if heartbeat.state == pb.SERVICE_STATE_STOPPED:
            self._end(life, End.STOPPED)
            return
        now_s = time.monotonic()
        if self._is_left_out(life):
            if heartbeat.state == pb.SERVICE_STATE_READY and not self._index.is_refused(life):
                past_epoch = self._index.past_epoch(life.worker_id)
                self._watch.note_shadowed(life, past_epoch, now_s)
            return
        if heartbeat.HasField("layout"):
            try:
                events.check_layout(heartbeat.layout)
            except BadRequest as error:
                self._refuse(life, error)
                return
        self._heard_s[life] = now_s
        delta = self._index.heartbeat(life, heartbeat.event_sequence, heartbeat.block_digest)
        self._mirror.append(delta)
        self._repairs.begin_if_needed(life)
        is_known = self._index.sequence(life) > 0
        load = heartbeat.load
        is_working = load.num_running > 0 or load.tokens_per_s > 0
        self._watch.note(life, is_working=is_working, is_known=is_known, now_s=now_s)

    def longest_prefix(self, query: pb.PrefixQuery) -> pb.PrefixHits:
        """Who holds how much of a prompt. Raises BadRequest."""
        self._num_lookups += 1
        return answer(self._index, query)

    async def sweep(self, forget_after_s: float) -> None:
        """For ever forget workers that fell silent; silence while NATS is away does not count."""
        while True:
            now_s = time.monotonic()
            self._forget_silent(now_s, forget_after_s)
            self._index.tidy()
            self._watch.note_doubted(self._index.doubted)
            self._watch.keep(self._index.sequences, now_s)
            self._measure()
            await asyncio.sleep(_SWEEP_S)

    async def stop_repairs(self) -> None:
        """Give up running repairs; the next process starts them again."""
        await self._repairs.stop()

    def _forget_silent(self, now_s: float, forget_after_s: float) -> None:
        followed = self._index.sequences
        heard_s = dict.fromkeys(followed, now_s)
        for life, at_s in self._heard_s.items():
            if life in followed or self._index.is_refused(life):
                heard_s[life] = at_s if self._bus.is_connected else now_s
        self._heard_s = {
            life: at_s for life, at_s in heard_s.items() if now_s - at_s <= forget_after_s
        }
        for life in followed.keys() - self._heard_s.keys():
            logger.info("forgetting worker %s: silent", life.worker_id)
            self._end(life, End.SILENT)

    def _measure(self) -> None:
        index, num_workers = self._index, len(self._index.sequences)
        self._summary = f"{num_workers} workers, {index.num_blocks} blocks"
        figures = {
            "workers": num_workers,
            "blocks": index.num_blocks,
            "max_blocks": index.max_blocks,
            "cut_blocks_total": index.num_cut,
            "broken_chains_total": index.num_broken_chains,
            "lookups_total": self._num_lookups,
            "late_total": self._num_late,
            "refused_total": self._num_refused,
            "refused_workers": sum(map(index.is_refused, self._heard_s)),
            "redis_up": not self._mirror.away_reason,
            "nats_up": self._bus.is_connected,
            **index.counts,
            **self._repairs.counts,
            **self._watch.counts,
        }
        self._metrics = {f"farspan_kv_index_{name}": value for name, value in figures.items()}

    def _refuse(self, life: Life, error: BadRequest) -> None:
        logger.error("worker %s is left out until it starts again: %s", life.worker_id, error)
        self._end(life, End.REFUSED)
        self._note_refused(life)

    def _is_ahead(self, life: Life) -> bool:
        """Whether a message is of a life that cannot have begun; each counts."""
        if not events.is_ahead(life, time.time_ns()):
            return False
        self._watch.note_ahead(life, time.monotonic())
        self._num_refused += 1
        return True

    def _is_left_out(self, life: Life) -> bool:
        """Whether a message is of a refused life, or of a past one; each counts."""
        if not self._index.is_over(life):
            return False
        if self._index.is_refused(life):
            self._note_refused(life)
        else:
            self._num_late += 1
        return True

    def _note_refused(self, life: Life) -> None:
        self._heard_s[life] = time.monotonic()
        self._num_refused += 1

    def _end(self, life: Life, end: End) -> None:
        ended = self._index.retire(life, end)
        if ended is not None:
            self._mirror.retire(ended)
        if end is not End.SILENT:
            self._mirror.note_over(life)


def answer(index: Index, query: pb.PrefixQuery) -> pb.PrefixHits:
    """Who holds how much of a prompt. Raises BadRequest."""
    packed = events.whole(query.block_hashes)
    with telemetry.span("kv_index.longest_prefix", num_blocks=len(packed) // HASH_BYTES) as span:
        found = index.longest_prefix(packed)
        span.set(
            num_workers=len(found),
            hit_blocks=max((hit.num_blocks for hit in found), default=0),
        )
    hits = pb.PrefixHits()
    for life, num_blocks, tier in found:  # field by field: twice as fast as by constructors
        hit = hits.hits.add()
        hit.worker.worker_id, hit.worker.epoch = life
        hit.num_blocks, hit.tier = num_blocks, tier
    return hits


@asynccontextmanager
async def serve(config: KvIndexConfig) -> AsyncIterator[int]:
    """kv_index at work inside the block; yields the port of its prefix queries.

    Raises ConfigError when NATS is missing at the start, or a Redis that is required, or when Redis
    refuses us.
    """
    index = Index(config.max_blocks)
    store = Store(config.redis_url, config.redis)
    mirror = Mirror(index, store, check_interval_s=config.redis_check_interval_s)
    async with (
        aclosing(store),
        bus.connect(config.nats_url, "kv_index", config.nats) as link,
    ):
        try:
            await _load(index, store, mirror)
        except StoreAway as error:
            if config.redis_required or isinstance(error, StoreRefused):
                raise ConfigError(f"no Redis at {store.place}: {error}") from error
            mirror.note_away(f"no Redis at {store.place}: {error}")
        service = KvIndex(link, index, mirror, Watch(config.mute_after_s))
        async with (
            tasks.background(mirror.run(), service.sweep(config.forget_after_s)),
            lifecycle.health(
                config.health_host, config.health_port, service.state, service.metrics
            ),
            prefix_rpc.serve(config.grpc_address, service.longest_prefix, config.grpc) as port,
            link.listen(subjects.BLOCK_EVENTS, service.on_events),
            link.listen(subjects.HEARTBEAT, service.on_heartbeat),
        ):
            try:
                yield port
            finally:
                await service.stop_repairs()
        await _flush(mirror)


async def _load(index: Index, store: Store, mirror: Mirror) -> None:
    """Start with what the last process knew, and other replicas know. Raises StoreAway."""
    lives = await store.load()
    for over, end in (await store.over()).items():
        index.retire(over, end)
    for life in lives:
        is_ahead = events.is_ahead(life.life, time.time_ns())
        if is_ahead or index.restore(life.life, life.sequence, life.changes) is None:  # it is over
            mirror.retire(life.life)
    logger.info("loaded %d blocks of %d workers", index.num_blocks, len(lives))


async def _flush(mirror: Mirror) -> None:
    """Leave the copy as good as it can be; the next process asks workers for the rest."""
    try:
        await mirror.write()
    except StoreAway as error:
        logger.warning("the copy in Redis is behind: %s", error)
