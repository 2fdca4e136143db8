"""One request's life on decode: it waits for room, imports its KV, generates, and ends once.

Until prefill's PREFILL_DONE was accepted, prefill answers for the request, and a failure here is
told to prefill; afterwards this worker sends the one end. Pools return to base in every case, and
not before the last pull and the last step that use them are over.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from services.decode.answer import Answer
from services.decode.blocks import Blocks, Holding
from services.decode.outbox import Outbox
from services.decode.prefills import Prefills
from services.decode.pull_window import PullWindow
from services.decode.request import Request
from services.decode.scheduler import DecodeScheduler
from services.decode.worker import Begin, Broken, StepThread
from shared import farspan_pb2 as pb
from shared import subjects, telemetry
from shared.block_hash import BLOCK_TOKENS
from shared.bus import Bus
from shared.engine.drawing import Drawing
from shared.engine.handoff.importer import KvImporter, PullRequest
from shared.engine.handoff.landing import Landing
from shared.engine.handoff.placing import Destination
from shared.errors import DeadlineExceeded, FarspanError, WorkerLost
from shared.grammar import Vocabulary

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
_LEASE_PARTS = 6  # five renewals may be lost

T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """What all requests of one decode rank share."""

    worker: pb.WorkerRef
    bus: Bus
    outbox: Outbox
    vocabulary: Vocabulary
    scheduler: DecodeScheduler
    blocks: Blocks
    steps: StepThread
    importer: KvImporter
    landing: Landing
    prefills: Prefills
    pull_threads: ThreadPoolExecutor  # as many as the importer has lanes
    pull_timeout_s: float


class Life:
    """Runs one request to its end."""

    def __init__(self, rank: Rank, request: Request, admit: Callable[[], None]) -> None:
        """`admit` is called when room has come free."""
        self._rank = rank
        self._request = request
        self._admit = admit

    async def run(self) -> None:
        """Return when the request has ended and holds nothing."""
        request = self._request
        try:
            end: pb.End | None = pb.End(reason=await self._until_stopped())
        except FarspanError as error:
            logger.info("request %s ends: %s", request.id, error)
            request.stop(error)  # from here on prefill cannot hand it over any more
            end = self._failed(error)
            await self._tell_prefill(error)
        if end is None:
            await self._give_back()
            return
        end.usage.CopyFrom(self._usage())
        stages = request.stages.told
        await asyncio.gather(request.stream.finish(end, stages), self._give_back())

    async def _until_stopped(self) -> pb.FinishReason:
        """Serve, unless the request is stopped or its time is up. Raises FarspanError only."""
        request = self._request
        serving = asyncio.create_task(self._serve())
        ends: set[asyncio.Future[Any]] = {serving, request.stopped}
        try:
            await asyncio.wait(
                ends, timeout=max(request.remaining_s, 0), return_when=asyncio.FIRST_COMPLETED
            )
            if serving.done():
                return serving.result()
            if request.stopped.done():
                raise request.stopped.result()
            raise DeadlineExceeded("the request's deadline passed")
        except FarspanError:
            raise
        except Exception as error:
            logger.exception("request %s failed", request.id)
            raise FarspanError("internal error on decode") from error
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    async def _serve(self) -> pb.FinishReason:
        request, rank = self._request, self._rank
        lease = asyncio.create_task(self._keep_lease())
        try:
            answer = await self._answer()
            await self._wait_for_room()
            await self._import()
        finally:
            lease.cancel()
        release = pb.Release(request_id=request.id, decode=rank.worker)
        await rank.bus.publish(subjects.RELEASE, release, worker=request.offer.prefill.worker_id)
        request.is_released = True
        return await self._generate(answer)

    async def _answer(self) -> Answer:
        """While prefill computes. Raises BadRequest for a grammar that cannot be used."""
        request, asked = self._request, self._request.offer.sampling
        token_ids = np.frombuffer(request.offer.token_ids, "<u4")
        resumed, vocabulary = request.offer.num_resumed_tokens, self._rank.vocabulary
        if asked.HasField("grammar"):  # the first one of all takes seconds
            drawing = await asyncio.to_thread(Drawing, asked, token_ids, resumed, vocabulary)
        else:
            drawing = Drawing(asked, token_ids, resumed, vocabulary)
        return Answer(drawing, asked.stop_token_ids, request.longest_answer)

    async def _wait_for_room(self) -> None:
        request = self._request
        with (
            telemetry.span("decode.queue", num_tokens=request.num_tokens) as span,
            request.stages.stage("decode.queue", request.num_tokens),
        ):
            await request.admitted.wait()
            allocation = self._holding.allocation
            span.set(hit_tokens=allocation.hit_tokens)
            await _finished(
                self._rank.steps.open(
                    request.id, allocation.block_ids, allocation.num_shared_blocks
                )
            )

    async def _import(self) -> None:
        request, allocation = self._request, self._holding.allocation
        layout = request.offer.layout
        window = PullWindow(request.num_tokens, layout.dcp_size, layout.interleave)
        destination = self._rank.landing.of(allocation.block_ids)
        pulled, num_bytes, reading_s = allocation.hit_tokens, 0, 0.0
        with telemetry.span("handoff.pull", hit_tokens=pulled) as span:
            while pulled < request.num_tokens or not request.is_handed_over:
                request.progress.clear()
                is_complete = request.is_handed_over
                end = window.end(pulled, request.num_ready_tokens, is_complete=is_complete)
                if end == pulled:
                    await request.progress.wait()
                    continue
                began_s = time.monotonic()
                with request.stages.stage("handoff.pull", end - pulled):
                    num_bytes += await self._pull(pulled, end, destination)
                reading_s += time.monotonic() - began_s
                pulled = end
            num_blocks = -(-(pulled - allocation.hit_tokens) // BLOCK_TOKENS)
            span.set(bytes=num_bytes, blocks=num_blocks, reading_ms=reading_s * 1e3)
        self._rank.blocks.imported(self._holding, request.num_tokens)

    async def _pull(self, first_token: int, last_token: int, destination: Destination) -> int:
        """The bytes moved; the tokens are complete and current then."""
        request, offer = self._request, self._request.offer
        pull = PullRequest(
            ranks=offer.ranks,
            blocks=offer.blocks,
            epoch=offer.prefill.epoch,
            interleave=offer.layout.interleave,
            first_token=first_token,
            last_token=last_token,
            deadline_s=max(0.0, min(self._rank.pull_timeout_s, request.remaining_s)),
            destination=destination,
        )
        try:
            pulling = self._rank.pull_threads.submit(self._rank.importer.pull, pull)
            counts = await _finished(pulling)
        except WorkerLost:
            request.is_prefill_lost = True
            raise
        return counts.num_bytes

    async def _generate(self, answer: Answer) -> pb.FinishReason:
        request, rank, done = self._request, self._rank, self._request.done
        assert done is not None
        token_id = done.first_token_id
        finish = answer.add(token_id)
        rank.scheduler.start(request.id)
        rank.scheduler.advance(request.id, 1)
        stage = request.stages.begin("decode.generate")
        with telemetry.span("decode.generate") as span:
            if finish is None:
                begin = Begin(request.id, token_id, request.num_tokens, done.last_hidden, answer)
                await _finished(rank.steps.begin(begin))
            while finish is None:
                result = await request.results.get()
                if isinstance(result, Broken):
                    raise result.error
                rank.blocks.wrote(self._holding, [token_id])
                rank.scheduler.advance(request.id, 1)
                token_id, finish = result.token_id, result.finish
                request.stream.add(token_id, result.logprobs)
                if finish is None:
                    request.stream.flush()
            span.set(tokens=answer.num_tokens)
        stage.end(answer.num_tokens)
        return finish

    async def _keep_lease(self) -> None:
        """Have prefill keep the blocks, and notice when it no longer can."""
        request, rank, prefill = self._request, self._rank, self._request.offer.prefill
        lease_s = request.offer.lease_ms / 1000
        renewal = pb.LeaseRenewal(decode=rank.worker, request_ids=[request.id])
        renewed_s = time.monotonic()
        while True:
            await asyncio.sleep(min(lease_s / _LEASE_PARTS, _WATCH_S))
            age_s = time.monotonic() - renewed_s
            loss = ""
            if age_s > lease_s:
                loss = f"the lease at {prefill.worker_id} ended while the bus was away"
            elif rank.prefills.is_lost(prefill):
                loss = f"prefill worker {prefill.worker_id} is gone"
            if loss:
                request.is_prefill_lost = True
                request.stop(WorkerLost(loss))
                return
            if age_s >= lease_s / _LEASE_PARTS and rank.bus.is_connected:
                await rank.bus.publish(subjects.LEASE_RENEWAL, renewal, worker=prefill.worker_id)
                renewed_s = time.monotonic()

    async def _tell_prefill(self, error: FarspanError) -> None:
        request = self._request
        if request.is_released:
            return
        request.is_released = True
        abort = pb.Abort(
            request_id=request.id, sender=self._rank.worker, failure=error.as_failure()
        )
        await self._rank.bus.publish(subjects.ABORT, abort, worker=request.offer.prefill.worker_id)

    async def _give_back(self) -> None:
        """No pull is under way; once no step is either, everything is free for others."""
        request, rank = self._request, self._rank
        if request.holding is not None:
            try:
                await asyncio.wrap_future(rank.steps.close(request.id))
            except WorkerLost:
                return  # without its step thread the process ends, and its pools with it
            rank.blocks.give_back(request.holding)
        rank.scheduler.release(request.id)
        self._admit()

    def _failed(self, error: FarspanError) -> pb.End | None:
        """The end this worker owes the gateway; None when prefill can still send it."""
        if not (self._request.is_handed_over or self._request.is_prefill_lost):
            return None
        return pb.End(reason=pb.FINISH_REASON_FAILED, failure=error.as_failure())

    def _usage(self) -> pb.Usage:
        request = self._request
        return pb.Usage(
            prompt_tokens=request.num_tokens - request.offer.num_resumed_tokens,
            cached_tokens=request.done.num_cached_tokens if request.done is not None else 0,
            generated_tokens=request.stream.num_tokens,
        )

    @property
    def _holding(self) -> Holding:
        assert self._request.holding is not None, "used before it was admitted"
        return self._request.holding


async def _finished(work: Future[T]) -> T:
    """The result of another thread's work; also a cancelled caller waits for its end, since
    what the thread uses is not free before.
    """
    waiting = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait({waiting})
        raise
