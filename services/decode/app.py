"""A decode worker wired up: offers, chunks and cancels in; tokens, heartbeats and block events out.

One `async with`: connect, load, say READY, work; then drain, say STOPPED, close.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from services.decode.blocks import Blocks
from services.decode.config import DecodeConfig
from services.decode.intake import Intake
from services.decode.life import Rank
from services.decode.offers import Terms
from services.decode.outbox import Outbox
from services.decode.parts import NUM_LANES, Parts, open_parts
from services.decode.prefills import Prefills
from services.decode.report import Report
from services.decode.scheduler import Capacity, DecodeScheduler
from services.decode.worker import Result, StepThread
from shared import bus, lifecycle, subjects, tasks
from shared import farspan_pb2 as pb
from shared.bus import Bus
from shared.errors import WorkerLost
from shared.grammar import Vocabulary

logger = logging.getLogger(__name__)

_BEAT_S = 0.5
_LOOK_S = 5.0
_LONGEST_STEP_S = 60.0  # steps take fractions of a second


class DecodeService:
    """The worker's state around its requests. Used on one event loop."""

    def __init__(self, rank: Rank, intake: Intake, report: Report, capacity: Capacity) -> None:
        self.rank = rank
        self.intake = intake
        self.capacity = capacity
        self.state: pb.ServiceState = pb.SERVICE_STATE_READY
        self._report = report

    async def beat(self) -> None:
        """For ever tell the fleet how this worker is."""
        while True:
            await self.publish_heartbeat()
            await asyncio.sleep(_BEAT_S)

    async def publish_heartbeat(self) -> None:
        """Tell it now."""
        if not self.rank.bus.is_connected:
            self.rank.prefills.excuse_silence()
            return  # an old heartbeat is worth nothing
        beat = self._report.heartbeat(self.state, self.rank.blocks, self.rank.steps.tokens_per_s)
        await self.rank.bus.publish(subjects.HEARTBEAT, beat)

    async def give_back_memory(self) -> None:
        """For ever unmap what GPU memory dead prefill ranks have left mapped here."""
        while True:
            await asyncio.to_thread(self.rank.importer.give_back_dead_memory)
            await asyncio.sleep(_BEAT_S)

    async def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        """Note that a prefill worker lives."""
        self.rank.prefills.observe(heartbeat)

    async def watch_steps(self) -> None:
        """Raise what has stopped the step thread: nothing can be served without it.

        WorkerLost for a step that does not end. It is looked at twice, since a process that stood
        still finds its step as old as the pause.
        """
        ended, was_long = asyncio.wrap_future(self.rank.steps.ended), False
        while True:
            done, _ = await asyncio.wait((ended,), timeout=_LOOK_S)
            if done:
                return ended.result()
            is_long = self.rank.steps.step_s > _LONGEST_STEP_S
            if is_long and was_long:
                raise WorkerLost(f"a step has not ended for {_LONGEST_STEP_S:.0f} s")
            was_long = is_long

    async def drain(self, timeout_s: float) -> None:
        """Leave the fleet: finish what is here, or end it so that gateways retry it."""
        if self.state == pb.SERVICE_STATE_STOPPED:
            return
        self.state = pb.SERVICE_STATE_DRAINING
        await self.publish_heartbeat()
        has_steps = not self.rank.steps.ended.done()
        await self.intake.drain(timeout_s if has_steps else 0.0)
        self.state = pb.SERVICE_STATE_STOPPED
        await self.publish_heartbeat()


class _Health:
    """What the probe says; read on its thread."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.service: DecodeService | None = None

    def state(self) -> tuple[bool, str]:
        if self.service is None:
            return False, "loading the checkpoint"
        if not self._bus.is_connected:
            return False, "NATS is away"
        if self.service.state != pb.SERVICE_STATE_READY:
            return False, "draining"
        return True, "ready"


@asynccontextmanager
async def serve(config: DecodeConfig) -> AsyncIterator[DecodeService]:
    """The worker at work inside the block; leaving it drains.

    Raises ConfigError when NATS, NIXL or the checkpoint is missing or does not fit.
    """
    async with bus.connect(config.nats_url, config.worker_id, config.nats) as link:
        health = _Health(link)
        async with (
            lifecycle.health(config.health_host, config.health_port, health.state),
            tasks.entered_aside(open_parts(config)) as parts,
            _working(config, link, parts) as service,
        ):
            health.service = service
            yield service


@asynccontextmanager
async def _working(config: DecodeConfig, link: Bus, parts: Parts) -> AsyncIterator[DecodeService]:
    loop = asyncio.get_running_loop()

    def deliver(results: list[Result]) -> None:
        loop.call_soon_threadsafe(service.intake.take, results)

    steps = StepThread(parts.engine, deliver)
    with ThreadPoolExecutor(NUM_LANES, "pull") as pull_threads, steps:
        service = _assemble(config, link, parts, steps, pull_threads)
        async with (
            tasks.background(
                service.watch_steps(),
                service.rank.blocks.announce(),
                service.rank.outbox.send(),
                service.give_back_memory(),
            ),
            _subscribed(service, config.worker_id),
            tasks.background(service.beat()),
        ):
            logger.info("serving %s as %s", config.model_name, config.worker_id)
            try:
                yield service
            finally:
                await service.drain(config.drain_s)


def _assemble(
    config: DecodeConfig,
    link: Bus,
    parts: Parts,
    steps: StepThread,
    pull_threads: ThreadPoolExecutor,
) -> DecodeService:
    worker = pb.WorkerRef(worker_id=config.worker_id, epoch=time.time_ns())
    shape = parts.engine.tier.pools.shape
    capacity = Capacity(
        host_pages=shape.num_host_pages,
        device_pages=shape.num_device_pages,
        index_pages=shape.num_host_pages,  # a block's index page has its host page's number
        max_sequences=config.max_concurrent,
    )
    scheduler = DecodeScheduler(capacity, parts.engine.policy, num_draft_tokens=0)
    model = parts.engine.config
    vocabulary = Vocabulary(config.checkpoint, model.vocab_size)
    rank = Rank(
        worker=worker,
        bus=link,
        outbox=Outbox(link),
        vocabulary=vocabulary,
        scheduler=scheduler,
        blocks=Blocks(worker, shape.num_host_pages, link),
        steps=steps,
        importer=parts.importer,
        landing=parts.landing,
        prefills=Prefills(time.monotonic),
        pull_threads=pull_threads,
        pull_timeout_s=config.pull_timeout_s,
    )
    terms = Terms(
        worker,
        parts.layout,
        vocabulary,
        model.max_position,
        parts.importer.reads_gpu_memory,
    )
    intake = Intake(rank, terms, config.max_waiting, model.hidden_size)
    report = Report(config, parts, worker, capacity, scheduler)
    return DecodeService(rank, intake, report, capacity)


@asynccontextmanager
async def _subscribed(service: DecodeService, worker_id: str) -> AsyncIterator[None]:
    link, intake, blocks = service.rank.bus, service.intake, service.rank.blocks
    async with AsyncExitStack() as stack:
        for subscription in (
            link.listen(subjects.HEARTBEAT, service.on_heartbeat),
            link.listen(subjects.CHUNK_READY, intake.on_chunk, worker=worker_id),
            link.listen(subjects.CANCEL, intake.on_cancel, worker=worker_id),
            link.listen(subjects.ABORT, intake.on_abort, worker=worker_id),
            link.listen(subjects.RESEND_TOKENS, intake.on_resend, worker=worker_id),
            link.answer(subjects.PREFILL_DONE, intake.on_prefill_done, worker=worker_id),
            link.answer(subjects.REPLAY, blocks.replay, worker=worker_id),
            link.answer(subjects.OFFER, intake.on_offer, worker=worker_id),
        ):
            await stack.enter_async_context(subscription)
        yield
