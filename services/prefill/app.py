"""A prefill worker wired up: prompts in over NATS, KV out over NIXL, first tokens to gateways."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from services.prefill.answers import Answers
from services.prefill.config import PrefillConfig
from services.prefill.handoff import Source
from services.prefill.heartbeats import Heartbeats
from services.prefill.intake import Door
from services.prefill.request import Surroundings
from services.prefill.requests import Requests
from services.prefill.worker import Runner, Worker
from shared import bus, lifecycle, subjects, tasks
from shared import farspan_pb2 as pb
from shared.block_journal import BlockJournal
from shared.bus import Bus
from shared.engine import ranks
from shared.engine.kv.allocator import BlockAllocator
from shared.errors import FarspanError, Overloaded
from shared.grammar import Vocabulary

logger = logging.getLogger(__name__)


class Engine(Runner, Protocol):
    """The ranks and what they are."""

    regions: Sequence[pb.RankRegions]
    layout: pb.KvLayout
    vocab_size: int
    max_position: int

    async def watch(self) -> None:
        """For ever; raises when the engine is lost."""
        ...


class Prefill:
    """The handlers around one engine. Used on one event loop."""

    def __init__(
        self, config: PrefillConfig, link: Bus, engine: Engine, heartbeats: Heartbeats
    ) -> None:
        worker = heartbeats.worker
        self._config = config
        self._link = link
        self._heartbeats = heartbeats
        self._journal = BlockJournal(worker)
        allocator = BlockAllocator(config.num_blocks, ranks=config.ranks)
        self.worker = Worker(engine, allocator, self._journal, link, config.chunk_tokens)
        self.answers = Answers(link)
        source = Source(worker, engine.layout, engine.regions, config.lease_s)
        vocabulary = Vocabulary(config.checkpoint, engine.vocab_size)
        door = Door(worker, config.model, vocabulary, engine.max_position)
        around = Surroundings(link, self.worker, self.answers, source)
        self.requests = Requests(around, door, config.max_requests)
        limits = pb.Limits(
            max_sequence_tokens=min(
                engine.max_position, allocator.num_blocks * allocator.block_tokens
            ),
            max_concurrent=config.max_requests,
        )
        heartbeats.describe(engine.layout, limits, self._measure)

    async def submit(self, submit: pb.Submit) -> pb.SubmitReply:
        """Accept a request at once, or say why not."""
        try:
            if self._heartbeats.state != pb.SERVICE_STATE_READY:
                raise Overloaded("this prefill worker is about to stop")
            await self.requests.accept(submit)
        except FarspanError as error:
            return pb.SubmitReply(failure=error.as_failure())
        return pb.SubmitReply(accepted=pb.Accepted())

    async def replay(self, request: pb.ReplayRequest) -> pb.ReplayReply:
        """Block events that kv_index has missed."""
        return self._journal.replay(request)

    async def drain(self) -> None:
        """Take no more requests and finish those that are here, for as long as is allowed."""
        self._heartbeats.enter(pb.SERVICE_STATE_DRAINING)
        try:
            async with asyncio.timeout(self._config.drain_s):
                await self.requests.drained()
        except TimeoutError:
            logger.warning("the drain's time is over, what is left ends as lost")

    @asynccontextmanager
    async def subscribed(self) -> AsyncIterator[None]:
        """Inside the block, messages are handled."""
        listen, answer, worker_id = self._link.listen, self._link.answer, self._config.worker_id
        async with (
            listen(subjects.CANCEL, self.requests.on_cancel, worker=worker_id),
            listen(subjects.ABORT, self.requests.on_abort, worker=worker_id),
            listen(subjects.RELEASE, self.requests.on_release, worker=worker_id),
            listen(subjects.LEASE_RENEWAL, self.requests.on_renewal, worker=worker_id),
            listen(subjects.RESEND_TOKENS, self.answers.resend, worker=worker_id),
            answer(subjects.REPLAY, self.replay, worker=worker_id),
            answer(subjects.SUBMIT, self.submit, worker=worker_id),
        ):
            yield

    def _measure(self, heartbeat: pb.Heartbeat) -> None:
        heartbeat.load.CopyFrom(self.worker.load())
        self._journal.describe(heartbeat)


@asynccontextmanager
async def serve(config: PrefillConfig) -> AsyncIterator[Prefill]:
    """The worker at work inside the block; leaving it drains, unless an error leaves it.

    Raises ConfigError when NATS, the checkpoint or NIXL is missing at the start, RankLost inside an
    exception group when a rank is lost later.
    """
    worker = pb.WorkerRef(worker_id=config.worker_id, epoch=time.time_ns())
    async with bus.connect(config.nats_url, config.worker_id, config.nats) as link:
        heartbeats = Heartbeats(link, worker, config.model)
        async with (
            lifecycle.health(config.health_host, config.health_port, heartbeats.readiness),
            _farewell(heartbeats),
            tasks.background(heartbeats.beat()),
            ranks.start(config.rank_settings(worker.epoch)) as engine,
            working(config, link, engine, heartbeats) as prefill,
        ):
            yield prefill


@asynccontextmanager
async def working(
    config: PrefillConfig, link: Bus, engine: Engine, heartbeats: Heartbeats
) -> AsyncIterator[Prefill]:
    """The same around an engine that runs already."""
    prefill = Prefill(config, link, engine, heartbeats)
    async with (
        prefill.requests.ended_on_exit(),
        tasks.background(prefill.worker.run(), engine.watch(), prefill.requests.watch_leases()),
        prefill.subscribed(),
    ):
        heartbeats.enter(pb.SERVICE_STATE_READY)
        yield prefill
        await prefill.drain()


@asynccontextmanager
async def _farewell(heartbeats: Heartbeats) -> AsyncIterator[None]:
    """Say last that this life is over, whatever ended it."""
    try:
        yield
    finally:
        heartbeats.state = pb.SERVICE_STATE_STOPPED
        await heartbeats.publish()
