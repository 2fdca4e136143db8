"""The router wired up: heartbeats and ended requests in, placements out, prefix hits from kv_index.

Without kv_index it goes on by load alone and by its own promises, and says so in log and figures.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.router import policy
from services.router.config import RouterConfig
from services.router.fleet import Fleet
from services.router.policy import Decision
from services.router.promises import Promises
from services.router.view import Hit, WorkerKey, key_of
from shared import bus, lifecycle, prefix_rpc, subjects, tasks, telemetry
from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES
from shared.bus import Bus
from shared.errors import BadRequest, DeadlineExceeded, FarspanError
from shared.nats_service import NatsService
from shared.prefix_rpc import IndexAway, PrefixClient

logger = logging.getLogger(__name__)

_CONTRACT_VERSION = "1.0.0"
_WATCH_S = 0.25


class Router:
    """The handlers around one fleet. Used on one event loop."""

    def __init__(self, config: RouterConfig, bus: Bus, index: PrefixClient) -> None:
        self._config = config
        self._bus = bus
        self._index = index
        self._fleet = Fleet(time.monotonic, config.silence_s)
        self._promises = Promises(time.monotonic)
        self._is_index_away = False
        self._is_learning = True
        self._counts: Counter[str] = Counter()

    def state(self) -> tuple[bool, str]:
        """Readiness and its reason, for the probe's thread."""
        if not self._bus.is_connected:
            return False, "NATS is away"
        if self._is_learning:
            return False, "hearing which workers there are"
        return True, "kv_index is away, placing by load alone" if self._is_index_away else "ready"

    def details(self) -> dict[str, int]:
        """The counters that NATS's statistics show."""
        return {
            "placed": self._counts["placed"],
            "refused": self._counts["refused"],
            "placed_without_index": self._counts["placed_without_index"],
            "open_promises": len(self._promises),
            "workers": len(self._fleet.live()),
        }

    async def learn_fleet(self) -> None:
        """Return when every worker has had time to be heard."""
        await asyncio.sleep(self._config.learn_s)
        self._is_learning = False

    async def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        """Keep the fleet's view fresh."""
        self._fleet.observe(heartbeat)

    async def on_ended(self, ended: pb.PlacementEnded) -> None:
        """Take back what was promised to a request."""
        self._promises.end(ended.request_id)

    async def watch_bus(self) -> None:
        """For ever note when we could not hear the fleet, so that nobody is taken for dead."""
        while True:
            if not self._bus.is_connected:
                self._fleet.excuse_silence()
            await asyncio.sleep(_WATCH_S)

    async def place(self, request: pb.PlaceRequest) -> pb.PlaceReply:
        """Choose workers and promise them the request."""
        with telemetry.span(
            "router.place",
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
        ) as span:
            try:
                lifetime_s = _check(request)
                hits = await self._lookup(request.block_hashes)
                decision = self._decide(request, hits)
            except FarspanError as error:
                self._counts["refused"] += 1
                span.set(reason=str(error), refusal=pb.FailureKind.Name(error.kind))
                return pb.PlaceReply(failure=error.as_failure())
            self._promises.make(request, decision, lifetime_s)
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

    def _decide(self, request: pb.PlaceRequest, hits: dict[WorkerKey, Hit]) -> Decision:
        """Never awaits: between a decision and its promise no other decision may come."""
        for key, hit in self._promises.prefixes_on_the_way(request.block_hashes).items():
            if key not in hits or hits[key].num_blocks < hit.num_blocks:
                hits[key] = hit
        workers = self._promises.applied(self._fleet.live())
        return policy.place(request, workers, hits, self._config.rates)

    async def _lookup(self, block_hashes: bytes) -> dict[WorkerKey, Hit]:
        if not block_hashes:
            return {}
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
    """The seconds the request has left. Raises BadRequest or DeadlineExceeded."""
    if not (request.request_id and request.model):
        raise BadRequest("a placement needs a request id and a model")
    if not (request.num_prompt_tokens and request.max_new_tokens):
        raise BadRequest("a placement needs a prompt and room for an answer")
    num_blocks = request.num_prompt_tokens // BLOCK_TOKENS
    if len(request.block_hashes) != num_blocks * HASH_BYTES:
        raise BadRequest(f"a prompt of {request.num_prompt_tokens} tokens has {num_blocks} hashes")
    lifetime_s = request.deadline_unix_ms / 1000 - time.time()
    if lifetime_s <= 0:
        raise DeadlineExceeded("the request's deadline had passed before it was placed")
    return lifetime_s


@asynccontextmanager
async def serve(config: RouterConfig) -> AsyncIterator[Router]:
    """The router at work inside the block. Raises ConfigError when NATS is missing at the start."""
    async with (
        bus.connect(config.nats_url, "router") as link,
        prefix_rpc.connect(config.kv_index_address) as index,
    ):
        router = Router(config, link, index)
        service = NatsService("router", _CONTRACT_VERSION, "Chooses workers.", router.details)
        async with (
            tasks.background(router.watch_bus()),
            lifecycle.health(config.health_host, config.health_port, router.state),
            link.listen(subjects.HEARTBEAT, router.on_heartbeat),
            link.listen(subjects.PLACEMENT_ENDED, router.on_ended),
        ):
            await router.learn_fleet()
            async with service.answering(link, subjects.PLACE, router.place):
                yield router
