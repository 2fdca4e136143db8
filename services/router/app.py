"""The router wired up: heartbeats and ended requests in, placements out, prefix hits from kv_index.

Without kv_index it goes on by load alone and by its own promises, and says so in log and figures.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.router import ledger, records
from services.router.config import RouterConfig
from services.router.fleet import Fleet
from services.router.gateways import Gateways
from services.router.hearing import Hearing
from services.router.journal import Journal
from services.router.ledger import LONGEST_LEASE_S, Ledger
from services.router.policy import Decision, Judgement
from services.router.promises import Promises
from services.router.records import Inputs
from services.router.reservations import Reservations
from services.router.view import Hit, WorkerKey, key_of
from shared import bus, lifecycle, prefix_rpc, subjects, tasks, telemetry
from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES
from shared.bus import Bus
from shared.errors import BadRequest, FarspanError
from shared.nats_service import NatsService
from shared.prefix_rpc import IndexAway, PrefixClient
from shared.recent import Recent

logger = logging.getLogger(__name__)

_CONTRACT_VERSION = "1.0.0"
_WATCH_S = 0.25
_GAUGES = {"open_promises", "workers", "index_up", "redis_up"}  # of the figures; others only grow


class Router:
    """The handlers around one fleet. Used on one event loop."""

    def __init__(
        self, config: RouterConfig, bus: Bus, index: PrefixClient, ledger: Ledger | None
    ) -> None:
        self._config = config
        self._bus = bus
        self._index = index
        self._fleet = Fleet(time.monotonic, config.silence_s)
        self._gateways = Gateways(time.monotonic, config.gateway_silence_s)
        self._promises = Promises(time.monotonic)
        self._reservations = Reservations(self._promises, ledger)
        self._journal = Journal(config.id, config.decisions_kept, config.decisions_file)
        self._is_index_away = False
        self._is_learning = True
        self._hearing = Hearing(bus, _WATCH_S, config.silence_s)
        self._misfits = Recent()  # workers whose heartbeats make no sense
        self._counts: Counter[str] = Counter()
        self._figures: dict[str, int] = {}

    def state(self) -> tuple[bool, str]:
        """Readiness and its reason, for the probe's thread."""
        if not self._bus.is_connected:
            return False, "NATS is away"
        if self._is_learning:
            return False, "hearing which workers there are"
        missing = []
        if self._is_index_away:
            missing.append("kv_index is away, placing by load alone")
        if away_reason := self._reservations.away_reason:
            missing.append(f"Redis is away, promises are not shared: {away_reason}")
        return True, "; ".join(missing) or "ready"

    def details(self) -> dict[str, int]:
        """The counters that NATS's statistics show."""
        return {
            "placed": self._counts["placed"],
            "refused": self._counts["refused"],
            "placed_without_index": self._counts["placed_without_index"],
            "placed_unshared": self._reservations.num_unshared,
            "decided_again": self._reservations.num_conflicts,
            "decisions_unwritten": self._journal.num_unwritten,
            "ended_for_silent_gateways": self._counts["ended_for_silent_gateways"],
            "refused_heartbeats": self._counts["refused_heartbeats"],
            "index_up": int(not self._is_index_away),
            "redis_up": int(not self._reservations.away_reason),
            "open_promises": len(self._promises),
            "workers": len(self._fleet.live()),
        }

    def metrics(self) -> dict[str, float]:
        """The same for Prometheus, for the probe's thread: at most a quarter of a second old."""
        return {
            f"farspan_router_{name}{'' if name in _GAUGES else '_total'}": value
            for name, value in self._figures.items()
        }

    async def learn_fleet(self) -> None:
        """Return when every worker has had time to be heard."""
        await asyncio.sleep(self._config.learn_s)
        self._is_learning = False

    async def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        """Keep the fleet's view fresh. A worker that tells nonsense is not part of it."""
        self._hearing.note()
        try:
            self._fleet.observe(heartbeat)
        except BadRequest as error:
            self._counts["refused_heartbeats"] += 1
            if heartbeat.worker.worker_id not in self._misfits:
                self._misfits.add(heartbeat.worker.worker_id)
                logger.error("refused: %s", error)
        else:
            self._misfits.forget(heartbeat.worker.worker_id)

    async def on_ended(self, ended: pb.PlacementEnded) -> None:
        """Take back what was promised to a request."""
        self._reservations.end(ended.request_id)

    async def on_gateway_alive(self, alive: pb.GatewayAlive) -> None:
        """Keep the promises made to this gateway."""
        self._hearing.note()
        self._gateways.hear(alive.gateway_id)

    def decisions(self, name: str) -> list[pb.DecisionRecord]:
        """What is remembered of a request, by its id or by one that its client knows."""
        return self._journal.find(name)

    async def on_decision_query(self, query: pb.DecisionQuery) -> None:
        """Tell what is remembered of a request, if anything."""
        found = self.decisions(query.id)
        if found:
            reply = pb.DecisionReply(records=found)
            await self._bus.publish(subjects.DECISION_REPLY, reply, gateway=query.reply_to)

    @asynccontextmanager
    async def sharing(self) -> AsyncIterator[None]:
        """Inside the block promises are shared and decisions are written."""
        await self._reservations.open()
        try:
            async with tasks.background(self._reservations.run(), self._journal.write()):
                yield
        finally:
            await self._reservations.close()
            await self._journal.flush()

    async def watch_bus(self) -> None:
        """For ever note when we could not hear, so that nobody is taken for dead; end what the dead
        have left.
        """
        while True:
            if await self._hearing.is_lost():
                self._fleet.excuse_silence()
                self._gateways.excuse_silence()
            self._end_for_the_dead()
            self._figures = self.details()
            await asyncio.sleep(_WATCH_S)

    def _end_for_the_dead(self) -> None:
        made_for = [
            (promise.reservation.gateway_id, promise.request_id) for promise in self._promises
        ]
        gone = self._gateways.gone({gateway_id for gateway_id, _ in made_for})
        left = [request_id for gateway_id, request_id in made_for if gateway_id in gone]
        for request_id in left:
            self._reservations.end(request_id)
        self._counts["ended_for_silent_gateways"] += len(left)
        if left:
            logger.error("ended %d promises of silent gateways: %s", len(left), sorted(gone))

    async def place(self, request: pb.PlaceRequest) -> pb.PlaceReply:
        """Choose workers and promise them the request."""
        with telemetry.span(
            "router.place",
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
        ) as span:
            try:
                lifetime_s = _check(request)
                hits = await self._lookup(request.block_hashes) if lifetime_s > 0 else {}
                decision = await self._reserve(request, hits, lifetime_s)
            except FarspanError as error:
                self._counts["refused"] += 1
                span.set(reason=str(error), refusal=pb.FailureKind.Name(error.kind))
                return pb.PlaceReply(failure=error.as_failure())
            self._counts["placed"] += 1
            placement = decision.placement
            span.set(
                reason=placement.reason,
                prefill=placement.prefill.worker_id,
                decode=placement.decode.worker_id,
                prefill_hit_tokens=placement.prefill_hit_tokens,
                decode_hit_tokens=placement.decode_hit_tokens,
            )
            return pb.PlaceReply(placement=placement)

    async def _reserve(
        self, request: pb.PlaceRequest, hits: dict[WorkerKey, Hit], lifetime_s: float
    ) -> Decision:
        """Decide, perhaps more than once; the last time stands in the journal."""
        bare, digest = records.without_hashes(request)
        latest: tuple[Inputs, Judgement] | None = None

        def decide() -> Decision:
            """Never awaits: between a decision and its promise no other decision may come."""
            nonlocal latest
            seen = Inputs(
                bare,
                digest,
                self._promises.applied(self._fleet.live()),
                self._promises.with_prefixes_on_the_way(hits, request.block_hashes),
                self._config.rates,
                lifetime_s,
            )
            latest = seen, records.judge(seen)
            return latest[1].placed()

        try:
            decision = await self._reservations.reserve(request, lifetime_s, decide)
        except FarspanError as error:
            if latest is not None:
                is_refusal = latest[1].refusal is not None
                self._note(*latest, withdrawn="" if is_refusal else str(error))
            raise
        assert latest is not None, "reserved without a decision"
        self._note(*latest)
        return decision

    def _note(self, seen: Inputs, judgement: Judgement, withdrawn: str = "") -> None:
        self._journal.add(int(time.time() * 1000), seen, judgement, withdrawn)

    async def _lookup(self, block_hashes: bytes) -> dict[WorkerKey, Hit]:
        """Who holds how much of the prompt; asked for the shortest too, so that traces show it."""
        with telemetry.span("index.lookup", num_blocks=len(block_hashes) // HASH_BYTES) as span:
            try:
                answer = await self._index.longest_prefix(
                    pb.PrefixQuery(block_hashes=block_hashes),
                    timeout_s=self._config.index_timeout_s,
                )
            except IndexAway as error:
                span.set(reason=f"no answer: {error}")
                self._note_index(str(error))
                self._counts["placed_without_index"] += 1
                return {}
            self._note_index("")
            hits = {key_of(hit.worker): Hit(hit.num_blocks, hit.tier) for hit in answer.hits}
            span.set(
                num_workers=len(hits),
                hit_blocks=max((hit.num_blocks for hit in hits.values()), default=0),
            )
            return hits

    def _note_index(self, away_reason: str) -> None:
        if away_reason and not self._is_index_away:
            logger.error("kv_index is away, placing by load alone: %s", away_reason)
        elif self._is_index_away and not away_reason:
            logger.info("kv_index answers again")
        self._is_index_away = bool(away_reason)


def _check(request: pb.PlaceRequest) -> float:
    """The seconds the request has left, at most a day. Raises BadRequest."""
    if not (request.request_id and request.model):
        raise BadRequest("a placement needs a request id and a model")
    if not (request.num_prompt_tokens and request.max_new_tokens):
        raise BadRequest("a placement needs a prompt and room for an answer")
    num_blocks = request.num_prompt_tokens // BLOCK_TOKENS
    if len(request.block_hashes) != num_blocks * HASH_BYTES:
        raise BadRequest(f"a prompt of {request.num_prompt_tokens} tokens has {num_blocks} hashes")
    return min(request.deadline_unix_ms / 1000 - time.time(), LONGEST_LEASE_S)


@asynccontextmanager
async def serve(config: RouterConfig) -> AsyncIterator[Router]:
    """The router at work inside the block. Raises ConfigError when NATS is missing at the start."""
    async with (
        bus.connect(config.nats_url, "router", config.nats) as link,
        prefix_rpc.connect(config.kv_index_address, config.kv_index) as index,
        ledger.opened(config.redis_url, config.redis, config.redis_timeout_s) as shared,
    ):
        router = Router(config, link, index, shared)
        service = NatsService("router", _CONTRACT_VERSION, "Chooses workers.", router.details)
        async with (
            router.sharing(),
            tasks.background(router.watch_bus()),
            lifecycle.health(config.health_host, config.health_port, router.state, router.metrics),
            link.listen(subjects.HEARTBEAT, router.on_heartbeat),
            link.listen(subjects.PLACEMENT_ENDED, router.on_ended),
            link.listen(subjects.GATEWAY_ALIVE, router.on_gateway_alive),
            link.listen(subjects.DECISION_QUERY, router.on_decision_query),
        ):
            await router.learn_fleet()
            async with service.answering(link, subjects.PLACE, router.place):
                yield router
