"""One placement of a request, from asking the router to the end of it.

Whatever happens, the router hears that the placement ended and, unless the answer ended by itself,
both workers hear exactly one cancel. Each attempt has its own id, so late messages of an earlier
one cannot be mistaken.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.fleet import Fleet
from services.gateway.inbox import Inbox
from services.gateway.mailroom import Mailroom
from shared import block_hash, subjects, telemetry
from shared import farspan_pb2 as pb
from shared.bus import Bus
from shared.errors import DeadlineExceeded, FarspanError, from_failure

_PLACE_S = 2.0  # the router answers in milliseconds; its own prefix query is bounded by 100 ms
_LONG_BYTES = 1 << 20  # of a prompt: copied in milliseconds, beside the loop
_SUBMIT_S = 5.0  # a million-token prompt is 4 MB on the bus


@dataclass(frozen=True)
class Line:
    """The gateway's connection to the rest of the system."""

    bus: Bus
    mailroom: Mailroom
    fleet: Fleet
    gateway_id: str
    model: str
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Job:
    """What is to be generated; nothing of it changes during the request's life."""

    request_id: str
    prompt: bytes  # token ids, wire form
    block_hashes: bytes  # of the prompt, wire form
    namespace: bytes  # the first parent of the block hashes
    sampling: pb.SamplingParams
    deadline_s: float  # on the line's clock
    deadline_unix_ms: int
    priority: int = 0
    session: str = ""  # what the client calls the conversation
    known_as: tuple[str, ...] = ()  # the ids that the client sees

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.prompt) // 4


class Attempt:
    """A placed request on its two workers. Close it in every case."""

    def __init__(self, line: Line, job: Job, number: int, received: Sequence[int]) -> None:
        """The attempt continues after the tokens that earlier attempts delivered."""
        self.request_id = job.request_id if number == 1 else f"{job.request_id}-{number}"
        self.placement: pb.Placement | None = None
        self.inbox = Inbox(len(received), [])
        self._line = line
        self._job = job
        self._received = block_hash.token_bytes(received)
        self._is_closed = False
        self._started_at_s = line.clock()

    async def place(self, excluded: Sequence[pb.WorkerRef]) -> None:
        """Get two workers. Raises what the router refuses with, WorkerLost if none answers."""
        request = pb.PlaceRequest(
            request_id=self.request_id,
            model=self._line.model,
            block_hashes=self._block_hashes(),
            num_prompt_tokens=self._job.num_prompt_tokens + self._num_received,
            max_new_tokens=self._sampling().max_new_tokens,
            deadline_unix_ms=self._job.deadline_unix_ms,
            excluded=excluded,
            priority=self._job.priority,
            known_as=self._job.known_as,
            gateway_id=self._line.gateway_id,
            session=self._job.session,
        )
        with telemetry.span("gateway.place") as span:
            reply = await self._line.bus.request(
                subjects.PLACE, request, timeout_s=self._timeout_s(_PLACE_S)
            )
            if reply.HasField("failure"):
                raise from_failure(reply.failure)
            if not (reply.placement.prefill.epoch and reply.placement.decode.epoch):
                raise FarspanError("the router named no workers")
            span.set(**_placement_attributes(reply.placement))
        self.placement = reply.placement

    async def submit(self) -> None:
        """Hand the request to its prefill worker; from now on tokens arrive in the inbox."""
        placement = self.placed
        self.inbox = Inbox(
            self._num_received,
            [placement.prefill, placement.decode],
            has_logprobs=self._job.sampling.HasField("num_logprobs"),
        )
        self._line.mailroom.add(self.request_id, self.inbox)
        self._started_at_s = self._line.clock()
        is_long = len(self._job.prompt) > _LONG_BYTES
        request = await asyncio.to_thread(self._submit) if is_long else self._submit()
        with telemetry.span("gateway.submit"):
            reply = await self._line.bus.request(
                subjects.SUBMIT,
                request,
                timeout_s=self._timeout_s(_SUBMIT_S),
                worker=placement.prefill.worker_id,
            )
            if reply.HasField("failure"):
                raise from_failure(reply.failure)
            if not reply.HasField("accepted"):
                raise FarspanError("the prefill worker answered neither yes nor no")

    def _submit(self) -> pb.Submit:
        placement = self.placed
        return pb.Submit(
            request_id=self.request_id,
            model=self._line.model,
            token_ids=self._job.prompt + self._received,
            block_hashes=self._block_hashes(),
            num_resumed_tokens=self._num_received,
            sampling=self._sampling(),
            prefill=placement.prefill,
            decode=placement.decode,
            gateway_id=self._line.gateway_id,
            deadline_unix_ms=self._job.deadline_unix_ms,
            hash_root=self._job.namespace,
        )

    def lost_worker(self) -> pb.WorkerRef | None:
        """The worker this attempt depends on that has fallen silent or begun another life."""
        if self.placement is None:
            return None
        # Whether decode still needs prefill is decode's to say, once tokens flow.
        needed = [self.placement.decode]
        if self.inbox.is_empty:
            needed.append(self.placement.prefill)
        now_s = self._line.clock()
        for worker in needed:
            if self._line.fleet.is_lost(worker, self._started_at_s, now_s):
                return worker
        return None

    async def close(self) -> None:
        """End the placement, and cancel both workers if the answer has not ended.

        Closing twice is harmless.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._line.mailroom.remove(self.request_id)
        if self.placement is not None and self.inbox.end is None:
            cancel = pb.Cancel(request_id=self.request_id)
            for worker in (self.placement.prefill, self.placement.decode):
                await self._line.bus.publish(subjects.CANCEL, cancel, worker=worker.worker_id)
        ended = pb.PlacementEnded(request_id=self.request_id)
        await self._line.bus.publish(subjects.PLACEMENT_ENDED, ended)

    @property
    def _num_received(self) -> int:
        return len(self._received) // 4

    @property
    def placed(self) -> pb.Placement:
        """The placement, after `place`."""
        assert self.placement is not None, "submit comes after place"
        return self.placement

    def _sampling(self) -> pb.SamplingParams:
        """The job's sampling, less what has been generated."""
        sampling = pb.SamplingParams()
        sampling.CopyFrom(self._job.sampling)
        sampling.max_new_tokens -= self._num_received
        sampling.min_new_tokens = max(0, sampling.min_new_tokens - self._num_received)
        if self._received:  # they came with the first token
            sampling.ClearField("num_prompt_logprobs")
        return sampling

    def _block_hashes(self) -> bytes:
        if not self._received:
            return self._job.block_hashes
        return block_hash.pack(
            block_hash.block_hashes(self._job.namespace, self._job.prompt + self._received)
        )

    def _timeout_s(self, longest_s: float) -> float:
        remaining_s = self._job.deadline_s - self._line.clock()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        return min(longest_s, remaining_s)


def _placement_attributes(placement: pb.Placement) -> dict[str, str | int]:
    return {
        "farspan.pd.prefill_worker": placement.prefill.worker_id,
        "farspan.pd.decode_worker": placement.decode.worker_id,
        "farspan.prefill_hit_tokens": placement.prefill_hit_tokens,
        "farspan.decode_hit_tokens": placement.decode_hit_tokens,
        "farspan.decision.reason": placement.reason,
    }
