"""All requests on this worker: who is here, what others say about them, and how they all end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.prefill import intake
from services.prefill.intake import Door
from services.prefill.request import Request, Surroundings
from services.prefill.work import Work
from shared import farspan_pb2 as pb
from shared import subjects, tasks, telemetry
from shared.engine.step import Sampling
from shared.errors import BadRequest, Cancelled, Overloaded, WorkerLost
from shared.recent import Recent

_LEASE_CHECK_S = 0.25
_LAST_WORDS_S = 3.0  # for the ends of requests that a stopping worker leaves behind


class Requests:
    """The requests between acceptance and end. Used on one event loop."""

    def __init__(self, around: Surroundings, door: Door, max_requests: int) -> None:
        self._around = around
        self._door = door
        self._max_requests = max_requests
        self._living: dict[str, Request] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._cancelled = Recent()  # perhaps while its grammar was compiled

    @asynccontextmanager
    async def ended_on_exit(self) -> AsyncIterator[None]:
        """When the block is left, whatever is still here ends as lost, so that others retry it."""
        try:
            yield
        finally:
            self.end_all()
            await tasks.finish(self._lives, _LAST_WORDS_S)

    async def accept(self, submit: pb.Submit) -> None:
        """Take a request in; from now on it ends exactly once. Raises why it is refused."""
        intake.check(submit, self._door, time.time() * 1000)
        self._check_room(submit)
        sampling = await self._first_sampling(submit)
        self._check_room(submit)
        asked = submit.sampling
        work = Work(
            request_id=submit.request_id,
            token_ids=intake.token_array(submit),
            hashes=intake.block_hashes(submit),
            sampling=sampling,
            trace=telemetry.inject(),
            num_prompt_logprobs=(
                asked.num_prompt_logprobs if asked.HasField("num_prompt_logprobs") else None
            ),
        )
        self._around.worker.enqueue(work)
        request = Request(self._around, submit, work)
        self._living[submit.request_id] = request
        life = asyncio.create_task(self._live(request))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    def _check_room(self, submit: pb.Submit) -> None:
        if submit.request_id in self._living:
            raise BadRequest(f"request {submit.request_id} is already here")
        if submit.request_id in self._cancelled:
            raise Cancelled("the request was cancelled before it was accepted")
        if len(self._living) >= self._max_requests:
            raise Overloaded(f"{self._max_requests} requests are here already")

    async def _first_sampling(self, submit: pb.Submit) -> Sampling:
        vocabulary = self._door.vocabulary
        if submit.sampling.HasField("grammar"):  # the first one of all takes seconds
            return await asyncio.to_thread(intake.first_sampling, submit, vocabulary)
        return intake.first_sampling(submit, vocabulary)

    def end_all(self) -> None:
        """End them as lost: a retryable error, since others can serve them."""
        for request in self._living.values():
            request.interrupt(WorkerLost("the prefill worker stops"))

    async def drained(self) -> None:
        """Return when none is left."""
        while self._lives:
            await asyncio.wait(self._lives)

    async def watch_leases(self) -> None:
        """For ever end requests whose decode worker has fallen silent."""
        while True:
            for request in self._living.values():
                request.check_lease()
            await asyncio.sleep(_LEASE_CHECK_S)

    async def on_cancel(self, cancel: pb.Cancel) -> None:
        """See subjects.CANCEL."""
        self._cancelled.add(cancel.request_id)
        if request := self._living.get(cancel.request_id):
            request.cancel()

    async def on_abort(self, abort: pb.Abort) -> None:
        """See subjects.ABORT."""
        if request := self._living.get(abort.request_id):
            request.abort(abort)

    async def on_release(self, release: pb.Release) -> None:
        """See subjects.RELEASE."""
        if request := self._living.get(release.request_id):
            request.release(release)

    async def on_renewal(self, renewal: pb.LeaseRenewal) -> None:
        """See subjects.LEASE_RENEWAL. What is gone cannot be kept: its abort was lost."""
        for request_id in renewal.request_ids:
            if request := self._living.get(request_id):
                request.renew(renewal.decode)
            else:
                await self._deny(request_id, renewal.decode)

    async def _deny(self, request_id: str, decode: pb.WorkerRef) -> None:
        failure = WorkerLost("the prefill worker no longer holds the request").as_failure()
        abort = pb.Abort(request_id=request_id, sender=self._door.worker, failure=failure)
        await self._around.bus.publish(subjects.ABORT, abort, worker=decode.worker_id)

    async def _live(self, request: Request) -> None:
        try:
            end = await request.run()
        finally:
            del self._living[request.submit.request_id]
        if end is not None:
            await request.tell(end)
