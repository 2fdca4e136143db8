"""Messages about requests, each told to the request it is about, from its offer to its end.

Knows which requests are live; what they do with a message is life.py's business. Used on one event
loop.
"""

import asyncio
import time

from services.decode import offers
from services.decode.life import Life, Rank
from services.decode.offers import Terms
from services.decode.request import Request
from services.decode.token_stream import TokenStream
from services.decode.worker import Result
from shared import farspan_pb2 as pb
from shared import tasks
from shared.errors import (
    BadRequest,
    Cancelled,
    FarspanError,
    Overloaded,
    WorkerLost,
    from_failure,
)
from shared.recent import Recent

_END_GRACE_S = 5.0  # for the ends of requests that a shutdown has stopped
_FLOAT_BYTES = 4


class Intake:
    """The live requests of one decode rank."""

    def __init__(self, rank: Rank, terms: Terms, max_waiting: int, hidden_size: int) -> None:
        self._rank = rank
        self._terms = terms
        self._max_waiting = max_waiting
        self._hidden_bytes = hidden_size * _FLOAT_BYTES
        self._requests: dict[str, Request] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._dropped = Recent()  # cancelled or aborted, perhaps before the offer came
        self._handed_over = Recent()
        self._is_draining = False

    @property
    def num_live(self) -> int:
        """Requests that are not over, their unanswered ends included."""
        return len(self._requests)

    async def on_offer(self, offer: pb.HandoffOffer) -> pb.HandoffReply:
        """Take a request in, or refuse it; the reply never waits for room."""
        try:
            held_tokens = self._accept(offer)
        except FarspanError as error:
            return pb.HandoffReply(failure=error.as_failure())
        return pb.HandoffReply(accepted=pb.HandoffAccepted(held_tokens=held_tokens))

    async def on_chunk(self, chunk: pb.ChunkReady) -> None:
        """More of a prompt can be pulled."""
        request = self._requests.get(chunk.request_id)
        if request is not None and request.offer.prefill == chunk.prefill:
            request.chunk_ready(chunk.num_ready_tokens)

    async def on_prefill_done(self, done: pb.PrefillDone) -> pb.Accepted:
        """Become the one who answers for the request. Raises WorkerLost if it is not here."""
        request = self._requests.get(done.request_id)
        if request is None or request.offer.prefill != done.prefill:
            if done.request_id in self._handed_over:  # a repeated message, answered before
                return pb.Accepted()
            raise WorkerLost(f"request {done.request_id} is not on this worker")
        if request.is_handed_over:
            return pb.Accepted()
        if request.stopped.done():
            raise request.stopped.result()
        if len(done.last_hidden) != self._hidden_bytes:
            raise BadRequest(f"a hidden state has {self._hidden_bytes} bytes")
        if done.first_token_id >= self._terms.vocabulary.size:
            raise BadRequest("the first token is not in the vocabulary")
        if request.offer.sampling.HasField("num_logprobs") != done.HasField("first_logprobs"):
            raise BadRequest("the first token's logprobs are told iff they were asked for")
        request.hand_over(done)
        self._handed_over.add(request.id)
        return pb.Accepted()

    async def on_cancel(self, cancel: pb.Cancel) -> None:
        """The gateway no longer wants the request."""
        self._drop(cancel.request_id, Cancelled("the request was cancelled"))

    async def on_abort(self, abort: pb.Abort) -> None:
        """Prefill has given the request up."""
        request = self._requests.get(abort.request_id)
        if request is not None:
            if request.offer.prefill != abort.sender or request.is_released:
                return
            request.is_released = True
        self._drop(abort.request_id, from_failure(abort.failure))

    async def on_resend(self, resend: pb.ResendTokens) -> None:
        """The gateway has missed tokens."""
        request = self._requests.get(resend.request_id)
        if request is not None:
            await request.stream.resend(resend.from_index)

    def take(self, results: list[Result]) -> None:
        """A step's results; those of requests that were stopped meanwhile are dropped."""
        for result in results:
            request = self._requests.get(result.request_id)
            if request is not None:
                request.results.put_nowait(result)

    async def until_over(self, timeout_s: float) -> None:
        """Return when the requests that are live now have ended, or after timeout_s."""
        running = list(self._lives.values())
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    async def drain(self, timeout_s: float) -> None:
        """Refuse offers, let what is here finish, and end the rest so that gateways retry it."""
        self._is_draining = True
        await self.until_over(timeout_s)
        for request in self._requests.values():
            request.stop(WorkerLost("the decode worker is shutting down"))
        await tasks.finish(list(self._lives.values()), _END_GRACE_S)

    def _accept(self, offer: pb.HandoffOffer) -> int:
        """The tokens that are held here already. Raises what refuses the offer."""
        before = self._requests.get(offer.request_id)
        if before is not None and before.offer == offer:  # a repeat whose answer was lost
            return _held_tokens(before)
        if self._is_draining:
            raise WorkerLost("the decode worker is shutting down")
        if offer.request_id in self._dropped:
            raise Cancelled("the request was cancelled before it was offered")
        offers.check(offer, self._terms, time.time() * 1000)
        if self._rank.scheduler.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests wait for room already")
        stream = TokenStream(self._rank.bus, self._rank.outbox, self._terms.worker, offer)
        request = Request(offer, stream, self._terms.max_position)
        self._rank.scheduler.enqueue(request.id, request.num_tokens, request.longest_answer)
        self._rank.prefills.note(offer.prefill)
        self._requests[request.id] = request
        self._lives[request.id] = asyncio.create_task(self._live(request))
        self._admit()
        return _held_tokens(request)

    async def _live(self, request: Request) -> None:
        try:
            await Life(self._rank, request, self._admit).run()
        finally:
            del self._requests[request.id]
            del self._lives[request.id]

    def _admit(self) -> None:
        """Reserve room for those who wait, in order of arrival."""
        for request_id in self._rank.scheduler.admit(self._reserve):
            self._requests[request_id].admitted.set()

    def _reserve(self, request_id: str) -> bool:
        request, scheduler = self._requests[request_id], self._rank.scheduler
        reserved = scheduler.reserved_tokens(request.num_tokens, request.longest_answer)
        request.holding = self._rank.blocks.hold(request.offer, reserved)
        return request.holding is not None

    def _drop(self, request_id: str, reason: FarspanError) -> None:
        self._dropped.add(request_id)
        request = self._requests.get(request_id)
        if request is not None:
            request.stop(reason)


def _held_tokens(request: Request) -> int:
    """What is sure to stay: nothing is held for a request that waits."""
    return 0 if request.holding is None else request.holding.allocation.hit_tokens
