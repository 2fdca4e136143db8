"""One request's conversation with its decode worker: offer, chunks, done; then lease and release.

Knows messages and their order, not why a request is handed over. Blocks are pinned while this
lives; decode checks generations, so an end of the lease can never give it another request's rows.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.prefill.work import Progress
from shared import farspan_pb2 as pb
from shared import subjects, telemetry
from shared.bus import Bus
from shared.engine.kv.allocator import Allocation
from shared.engine.step import Sampled
from shared.errors import FarspanError, NoAnswer, from_failure

_OFFER_TIMEOUT_S = 5.0  # the prompt of a million tokens is 4 MB on the bus
_DONE_TIMEOUT_S = 2.0
_DONE_PAUSE_S = 0.1


@dataclass(frozen=True)
class Source:
    """What all offers of this life of this worker have in common."""

    worker: pb.WorkerRef
    layout: pb.KvLayout
    ranks: Sequence[pb.RankRegions]
    lease_s: float


class Handoff:
    """Offered, accepted, done, handed over, released; each at most once and in this order."""

    def __init__(
        self, bus: Bus, source: Source, submit: pb.Submit, clock: Callable[[], float]
    ) -> None:
        self._bus = bus
        self._source = source
        self._submit = submit
        self._clock = clock
        self._accepted = asyncio.Event()
        self._released = asyncio.Event()
        self._lease_until_s = float("inf")
        self._is_done_sent = False
        self.is_offered = False  # decode may know of the request
        self.is_handed_over = False  # decode answers the gateway from now on

    @property
    def is_lease_over(self) -> bool:
        """Whether decode has not been heard of for too long."""
        return self._clock() > self._lease_until_s

    def renew(self) -> None:
        """Decode still wants the blocks."""
        self._lease_until_s = self._clock() + self._source.lease_s

    def release(self) -> bool:
        """Decode needs the blocks no more; False if it gave up before it had everything.

        A release after PREFILL_DONE says that it was heard, even if the answer was lost.
        """
        if self._is_done_sent:
            self.is_handed_over = True
            self._released.set()
        return self._is_done_sent

    async def follow(self, allocation: Allocation, progress: Progress) -> None:
        """Offer the blocks, then for ever tell of finished chunks. Raises decode's refusal."""
        with telemetry.span("handoff.offer", num_blocks=len(allocation.block_ids)) as span:
            span.set(held_tokens=await self._offer(allocation))
        num_told = 0
        while True:
            num_told = await progress.beyond(num_told)
            ready = pb.ChunkReady(
                request_id=self._submit.request_id,
                prefill=self._source.worker,
                num_ready_tokens=num_told,
            )
            await self._bus.publish(subjects.CHUNK_READY, ready, worker=self._decode_id)

    async def done(self, sampled: Sampled, num_cached_tokens: int) -> None:
        """Return when decode has taken the request over. Raises its refusal.

        Silence is no refusal: it is asked again for as long as the lease lives, which others watch.
        """
        await self._accepted.wait()
        message = pb.PrefillDone(
            request_id=self._submit.request_id,
            prefill=self._source.worker,
            first_token_id=sampled.token_id,
            last_hidden=sampled.last_hidden,
            num_cached_tokens=num_cached_tokens,
            first_logprobs=sampled.logprobs,
        )
        self._is_done_sent = True
        while not self.is_handed_over:
            try:
                await self._bus.request(
                    subjects.PREFILL_DONE,
                    message,
                    timeout_s=_DONE_TIMEOUT_S,
                    worker=self._decode_id,
                )
            except NoAnswer:
                await asyncio.sleep(_DONE_PAUSE_S)
            else:
                self.is_handed_over = True

    async def released(self) -> None:
        """Return when decode needs the blocks no more."""
        await self._released.wait()

    async def abort(self, failure: pb.Failure) -> None:
        """Tell decode to drop the request, if it may know of it."""
        if not self.is_offered:
            return
        message = pb.Abort(
            request_id=self._submit.request_id, sender=self._source.worker, failure=failure
        )
        await self._bus.publish(subjects.ABORT, message, worker=self._decode_id)

    @property
    def _decode_id(self) -> str:
        return self._submit.decode.worker_id

    async def _offer(self, allocation: Allocation) -> int:
        refs = zip(allocation.block_ids, allocation.generations, strict=True)
        offer = pb.HandoffOffer(
            request_id=self._submit.request_id,
            prefill=self._source.worker,
            decode=self._submit.decode,
            token_ids=self._submit.token_ids,
            block_hashes=self._submit.block_hashes,
            hash_root=self._submit.hash_root,
            num_resumed_tokens=self._submit.num_resumed_tokens,
            sampling=self._submit.sampling,
            gateway_id=self._submit.gateway_id,
            deadline_unix_ms=self._submit.deadline_unix_ms,
            layout=self._source.layout,
            ranks=self._source.ranks,
            blocks=[pb.BlockRef(block_id=b, generation=g) for b, g in refs],
            lease_ms=int(self._source.lease_s * 1000),
        )
        self.is_offered = True
        self.renew()
        reply = await self._bus.request(
            subjects.OFFER, offer, timeout_s=_OFFER_TIMEOUT_S, worker=self._decode_id
        )
        if reply.HasField("failure"):
            self.is_offered = False
            raise from_failure(reply.failure)
        if not reply.HasField("accepted"):
            raise FarspanError("the decode worker answered an offer with neither yes nor no")
        self._accepted.set()
        return reply.accepted.held_tokens
