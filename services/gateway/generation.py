"""One request's life: placed, submitted, streamed, resumed when a worker is lost, ended once.

The only place in the system that retries. Knows token ids; knows neither text nor HTTP. The reader
sees one unbroken sequence of tokens, however many attempts it took.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.gateway.attempt import Attempt, Job, Line
from services.gateway.inbox import Batch
from services.gateway.ledger import Usage
from services.gateway.logprobs import RawLogprob, unpack
from shared import farspan_pb2 as pb
from shared.errors import (
    DeadlineExceeded,
    FarspanError,
    Overloaded,
    WorkerLost,
    from_failure,
)

MAX_ATTEMPTS = 3
_WATCH_S = 0.25  # how often a silent answer's workers are checked
_PATIENCE_S = 10.0  # a lost worker's restart, when no other can take over
_PATIENCE_STEP_S = 0.25


@dataclass(frozen=True)
class _Suspect:
    """A worker better avoided: until it is heard after it was found silent, else for good."""

    worker: pb.WorkerRef
    silent_at_s: float = float("inf")


@asynccontextmanager
async def generation(line: Line, job: Job) -> AsyncIterator["Generation"]:
    """An accepted request; leaving the block ends it everywhere, in whatever state it is.

    Raises what refuses the request: TooLong, Overloaded, WorkerLost, DeadlineExceeded.
    """
    request = Generation(line, job)
    try:
        await request.start()
        yield request
    finally:
        await request.close()


class Generation:
    """The state of one request. Read `batches` to its end, then `finish_reason` and `usage`."""

    def __init__(self, line: Line, job: Job) -> None:
        self.finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
        self.num_attempts = 0  # that found workers
        self._line = line
        self._job = job
        self._received: list[int] = []
        self._cached_tokens = 0
        self._prompt_logprobs: pb.TokenLogprobs | None = None
        self._stages: list[tuple[int, str, pb.Stage]] = []  # of earlier attempts
        self._suspects: list[_Suspect] = []  # full, silent or said to be gone
        self._failure: FarspanError | None = None  # why the last attempt ended
        self._patient_until_s = float("inf")
        self._number = 1  # of the attempt, whether it finds workers or not
        self._attempt = Attempt(line, job, self._number, [])

    @property
    def usage(self) -> Usage:
        """What the request has cost so far."""
        num_prompt_tokens = self._job.num_prompt_tokens
        cached = min(self._cached_tokens, num_prompt_tokens)
        return Usage(num_prompt_tokens, cached, len(self._received))

    @property
    def prompt_logprobs(self) -> list[RawLogprob]:
        """Of every prompt token, once the first token of the answer is here.

        Raises FarspanError if they were not sent.
        """
        return unpack(self._prompt_logprobs or pb.TokenLogprobs(), self._job.num_prompt_tokens)

    @property
    def stages(self) -> list[tuple[int, str, pb.Stage]]:
        """What workers have told: (number of the attempt, worker's id, stage)."""
        return self._stages + self._told_stages()

    async def start(self) -> None:
        """Find workers that accept the request, elsewhere if the first ones do not."""
        while True:
            try:
                await self._attempt.place(self._excluded())
            except (WorkerLost, Overloaded) as error:
                await self._unplaced(error)
                continue
            self.num_attempts += 1
            try:
                await self._attempt.submit()
            except (WorkerLost, Overloaded) as error:
                await self._retry(error, _Suspect(self._attempt.placed.prefill))
            else:
                return

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """The answer's tokens, each once and in order; an empty batch means waiting goes on."""
        while self.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            await self._attempt.inbox.wait(min(_WATCH_S, max(0.0, self._remaining_s())))
            fresh = self._attempt.inbox.take()
            if fresh.token_ids:
                self._note_told()
                self._received.extend(fresh.token_ids)
                yield fresh
                continue
            await self._check()
            yield Batch()

    async def close(self) -> None:
        """End the request everywhere. Closing twice is harmless."""
        await self._attempt.close()

    async def _check(self) -> None:
        """Nothing has arrived: has the answer ended, or its worker, or its time?"""
        end = self._attempt.inbox.end
        if end is not None:
            await self._finish(end)
        elif self._remaining_s() <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        else:
            lost = self._attempt.lost_worker()
            if lost is not None:
                suspect = _Suspect(lost, self._line.clock())
                await self._resume(WorkerLost(f"worker {lost.worker_id} is gone"), suspect)

    async def _finish(self, end: pb.End) -> None:
        if end.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
            self._note_told()
            self.finish_reason = end.reason
            return
        if end.reason != pb.FINISH_REASON_FAILED:
            raise FarspanError("an answer ended without a reason")
        error = from_failure(end.failure)
        if not isinstance(error, WorkerLost | Overloaded):
            raise error
        await self._resume(error, self._suspect_of(error))

    async def _resume(self, error: FarspanError, suspect: _Suspect | None) -> None:
        """Continue on other workers, unless every token is here and only the end was lost."""
        sampling = self._job.sampling
        if self._received and self._received[-1] in sampling.stop_token_ids:
            self.finish_reason = pb.FINISH_REASON_STOP
        elif len(self._received) >= sampling.max_new_tokens:
            self.finish_reason = pb.FINISH_REASON_LENGTH
        else:
            await self._retry(error, suspect)
            await self.start()

    async def _retry(self, error: FarspanError, suspect: _Suspect | None) -> None:
        """Give the attempt up and make the next one ready; raises the error after the last."""
        await self._attempt.close()
        if self.num_attempts >= MAX_ATTEMPTS:
            raise error
        self._stages += self._told_stages()
        self._failure = error
        if suspect is not None:
            self._suspects.append(suspect)
        self._patient_until_s = self._line.clock() + _PATIENCE_S
        self._next_attempt()

    async def _unplaced(self, error: FarspanError) -> None:
        """The router has no workers: the client's problem at first, ours once we had some."""
        await self._attempt.close()
        if self._remaining_s() <= 0:
            raise DeadlineExceeded("the request's deadline passed") from error
        if self._failure is None:
            raise error
        is_only_full = isinstance(self._failure, Overloaded) and not self._received
        if is_only_full or self._line.clock() > self._patient_until_s:
            raise self._failure
        self._suspects.clear()  # better a doubtful worker than none: it may speak again
        await asyncio.sleep(min(_PATIENCE_STEP_S, self._remaining_s()))
        self._next_attempt()

    def _next_attempt(self) -> None:
        self._number += 1
        self._attempt = Attempt(self._line, self._job, self._number, self._received)

    def _excluded(self) -> list[pb.WorkerRef]:
        fleet = self._line.fleet
        return [
            suspect.worker
            for suspect in self._suspects
            if not fleet.is_heard_after(suspect.silent_at_s, suspect.worker)
        ]

    def _suspect_of(self, error: FarspanError) -> _Suspect | None:
        """Who is to be avoided after a worker ended the answer with this error."""
        placement, sender = self._attempt.placement, self._attempt.inbox.end_sender
        if placement is None:
            return None
        if isinstance(error, Overloaded):
            return _Suspect(
                placement.decode
            )  # prefill says so when it is asked, in its reply to the submit
        is_from_prefill = sender == placement.prefill
        return _Suspect(placement.decode if is_from_prefill else placement.prefill)

    def _note_told(self) -> None:
        """The first attempt that delivers tells the hit: later ones would find what it computed."""
        inbox = self._attempt.inbox
        if self.num_attempts == 1 or not self._received:
            reported = inbox.end.usage.cached_tokens if inbox.end is not None else 0
            self._cached_tokens = max(inbox.told.cached_tokens, reported)
        if self._prompt_logprobs is None:
            self._prompt_logprobs = inbox.told.prompt_logprobs

    def _told_stages(self) -> list[tuple[int, str, pb.Stage]]:
        told = self._attempt.inbox.told.stages
        return [(self.num_attempts, worker_id, stage) for worker_id, stage in told]

    def _remaining_s(self) -> float:
        return self._job.deadline_s - self._line.clock()
