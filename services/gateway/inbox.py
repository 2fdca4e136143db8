"""What has arrived of one answer: tokens in order, each once, then the end.

Pure bookkeeping of indices plus one event to wait for; knows nothing of NATS. Messages may be
lost, repeated or late, so every message says where its tokens belong.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.logprobs import RawLogprob, unpack
from shared import farspan_pb2 as pb
from shared.block_hash import token_ids


@dataclass(frozen=True)
class Batch:
    """Tokens that arrived together; logprobs has as many entries, or none if not asked for."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[RawLogprob] = ()


@dataclass
class Told:
    """What workers said of an attempt besides its tokens."""

    cached_tokens: int = 0
    prompt_logprobs: pb.TokenLogprobs | None = None
    stages: list[tuple[str, pb.Stage]] = field(default_factory=list)  # with the worker's id


class Inbox:
    """One attempt's answer, from the index the attempt begins at."""

    def __init__(
        self, first_index: int, senders: list[pb.WorkerRef], *, has_logprobs: bool = False
    ) -> None:
        self.next_index = first_index
        self.end: pb.End | None = None
        self.told = Told()
        self._first_index = first_index
        self._has_logprobs = has_logprobs
        self.end_sender = pb.WorkerRef()
        self._senders = {(sender.worker_id, sender.epoch) for sender in senders}
        self._token_ids: list[int] = []
        self._logprobs: list[RawLogprob] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def sender_ids(self) -> list[str]:
        """The two workers this attempt's messages may come from."""
        return [worker_id for worker_id, _ in self._senders]

    @property
    def is_empty(self) -> bool:
        """Whether no token of this attempt has arrived yet."""
        return self.next_index == self._first_index

    def trusts(self, sender: pb.WorkerRef) -> bool:
        """Whether the sender is one of the two workers of this attempt, in this life of theirs."""
        return (sender.worker_id, sender.epoch) in self._senders

    def accept(self, message: pb.Tokens) -> bool:
        """Take the tokens not seen before; False, and none taken, when earlier ones are missing.

        A failure ends the answer whatever is missing: the next attempt continues from what is here.
        Raises FarspanError, and takes nothing, for tokens without the logprobs that were asked for.
        """
        if self.end is not None:
            return True
        has_gap = message.index > self.next_index
        if not has_gap:
            self._take_in(message)
        if message.HasField("end") and (
            not has_gap or message.end.reason == pb.FINISH_REASON_FAILED
        ):
            self.end, self.end_sender = message.end, message.sender
            has_gap = False
        self._wake()
        return not has_gap

    def fail(self, failure: pb.Failure, sender: pb.WorkerRef) -> None:
        """End the answer: what a worker sent cannot be used."""
        if self.end is None:
            self.end = pb.End(reason=pb.FINISH_REASON_FAILED, failure=failure)
            self.end_sender = sender
            self._wake()

    def take(self) -> Batch:
        """The tokens that arrived since the last call."""
        taken = Batch(self._token_ids, self._logprobs)
        self._token_ids, self._logprobs = [], []
        return taken

    async def wait(self, timeout_s: float) -> None:
        """Return when something has arrived that was not taken, or after timeout_s.

        For one reader. A token comes this way every time, and asyncio.timeout costs 9 us.
        """
        if self._token_ids or self.end is not None:
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_in(self, message: pb.Tokens) -> None:
        ids = token_ids(message.token_ids)
        num_known = self.next_index - message.index
        fresh = ids[num_known:]
        if self._has_logprobs and fresh:
            self._logprobs += unpack(message.logprobs, len(ids))[num_known:]
        told = self.told
        if message.stages and (fresh or message.HasField("end")):
            told.stages += [(message.sender.worker_id, stage) for stage in message.stages]
        if message.HasField("prompt_logprobs"):
            told.prompt_logprobs = message.prompt_logprobs
        if message.cached_tokens:
            told.cached_tokens = max(told.cached_tokens, message.cached_tokens)
        self.next_index += len(fresh)
        self._token_ids.extend(fresh)
