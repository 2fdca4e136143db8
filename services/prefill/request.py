"""One request's life on this worker, from acceptance to exactly one end.

Either decode answers for it from PREFILL_DONE on, or this life sends the end itself; whatever
happens, the blocks are given back.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.prefill.answers import Answers
from services.prefill.handoff import Handoff, Source
from services.prefill.work import Work
from services.prefill.worker import Worker
from shared import farspan_pb2 as pb
from shared import logprobs, tasks, telemetry
from shared.block_hash import token_bytes
from shared.bus import Bus
from shared.engine.step import Sampled
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    FarspanError,
    WorkerLost,
    from_failure,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What every request's life needs."""

    bus: Bus
    worker: Worker
    answers: Answers
    source: Source
    clock: Callable[[], float] = time.monotonic


class Request:
    """Its `run` is the life, `tell` the end; the rest is what others have to say about it."""

    def __init__(self, around: Surroundings, submit: pb.Submit, work: Work) -> None:
        self.submit = submit
        self._around = around
        self._work = work
        self._handoff = Handoff(around.bus, around.source, submit, around.clock)
        self._interrupted: asyncio.Future[FarspanError] = asyncio.get_running_loop().create_future()
        # What the gateway is told of the answer; without tokens until there is one.
        self._message = pb.Tokens(
            request_id=submit.request_id,
            sender=around.source.worker,
            index=submit.num_resumed_tokens,
        )
        # From now on, not from the life's first turn: a step may begin before that.
        self._queueing = telemetry.start("prefill.queue", num_tokens=work.num_tokens)

    async def run(self) -> pb.End | None:
        """Return when its blocks are free: how it ended, or None if that is decode's to say."""
        try:
            return await self._outcome()
        finally:
            self._around.worker.release(self._work)

    async def tell(self, end: pb.End) -> None:
        """Tell decode and the gateway; return when the gateway has heard it."""
        reason = end.failure.message or "the answer ended with its first token"
        kind = end.failure.kind or pb.FAILURE_KIND_CANCELLED
        await self._handoff.abort(pb.Failure(kind=kind, message=reason))
        await self._around.answers.end(self.submit, self._message, end)

    def interrupt(self, error: FarspanError) -> None:
        """End it with this error, unless it has ended; after the handoff only free its blocks."""
        if not self._interrupted.done():
            self._interrupted.set_result(error)

    def cancel(self) -> None:
        """The client left."""
        self.interrupt(Cancelled("the request was cancelled"))

    def abort(self, abort: pb.Abort) -> None:
        """Decode says that the request has failed there."""
        if abort.sender == self.submit.decode:
            self._handoff.is_offered = False
            self.interrupt(from_failure(abort.failure))

    def release(self, release: pb.Release) -> None:
        """Decode needs the blocks no more."""
        if release.decode == self.submit.decode and not self._handoff.release():
            self.interrupt(WorkerLost("the decode worker gave the handoff up"))

    def renew(self, decode: pb.WorkerRef) -> None:
        """Decode still wants the blocks."""
        if decode == self.submit.decode:
            self._handoff.renew()

    def check_lease(self) -> None:
        """End it if decode has fallen silent."""
        if self._handoff.is_lease_over:
            self.interrupt(WorkerLost("the decode worker let its lease end"))

    async def _outcome(self) -> pb.End | None:
        living = asyncio.create_task(self._live())
        try:
            await asyncio.wait(
                (living, self._interrupted),
                timeout=max(0.0, self.submit.deadline_unix_ms / 1000 - time.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if living.done():
                return living.result()
            if self._interrupted.done():
                raise self._interrupted.result()
            raise DeadlineExceeded("the request's deadline passed during prefill")
        except FarspanError as error:
            failure = error.as_failure()
        except Exception:
            logger.exception("%s failed", self.submit.request_id)
            failure = FarspanError("internal error in prefill").as_failure()
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            self._queueing.end()
        if self._handoff.is_handed_over:
            return None
        logger.info("%s ends: %s", self.submit.request_id, failure.message)
        return pb.End(reason=pb.FINISH_REASON_FAILED, failure=failure, usage=self._usage())

    async def _live(self) -> pb.End | None:
        allocation = await self._work.admitted
        self._queueing.set(num_hit_tokens=allocation.hit_tokens)
        self._queueing.end()
        if self.submit.sampling.max_new_tokens == 1:
            return await self._first_token()
        try:
            async with tasks.background(self._handoff.follow(allocation, self._work.progress)):
                end = await self._first_token()
                if end is None:
                    await self._hand_over()
                return end
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _first_token(self) -> pb.End | None:
        """Send it as soon as it is there; the end if it is also the last."""
        sampled = await self._work.sampled
        token_id = sampled.token_id
        self._message.token_ids = token_bytes([token_id])
        self._message.cached_tokens = self._usage().cached_tokens
        self._tell_details(sampled)
        await self._around.answers.first(self._message, self.submit.gateway_id)
        if token_id in self.submit.sampling.stop_token_ids:
            return pb.End(reason=pb.FINISH_REASON_STOP, usage=self._usage())
        if self.submit.sampling.max_new_tokens == 1:
            return pb.End(reason=pb.FINISH_REASON_LENGTH, usage=self._usage())
        return None

    def _tell_details(self, sampled: Sampled) -> None:
        """What goes with the first token besides itself."""
        work, message = self._work, self._message
        if sampled.logprobs is not None:
            message.logprobs.CopyFrom(sampled.logprobs)
        if work.num_prompt_logprobs is not None:
            num_prompt = work.num_tokens - self.submit.num_resumed_tokens
            told = logprobs.of_prompt(work.prompt_logprobs, work.num_prompt_logprobs, num_prompt)
            message.prompt_logprobs.CopyFrom(told)
        if work.telling is not None:
            work.telling.end(1)
        message.stages.extend(work.stages.told)

    async def _hand_over(self) -> None:
        with telemetry.span("handoff.done"):
            await self._handoff.done(self._work.sampled.result(), self._usage().cached_tokens)
        await self._handoff.released()

    def _usage(self) -> pb.Usage:
        num_resumed = self.submit.num_resumed_tokens
        num_prompt = self._work.num_tokens - num_resumed
        allocation = self._work.allocation
        hit = allocation.hit_tokens if allocation is not None else 0
        return pb.Usage(
            prompt_tokens=num_prompt,
            cached_tokens=min(hit, num_prompt),
            generated_tokens=num_resumed + bool(self._message.token_ids),
        )
