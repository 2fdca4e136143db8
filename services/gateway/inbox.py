"""What has arrived of one answer: tokens in order, each once, then the end.

Pure bookkeeping of indices plus one event to wait for; knows nothing of NATS. Messages may be
lost, repeated or late, so every message says where its tokens belong.
"""

import asyncio

from shared import farspan_pb2 as pb
from shared.block_hash import token_ids


class Inbox:
    """One attempt's answer, from the index the attempt begins at."""

    def __init__(self, first_index: int, senders: list[pb.WorkerRef]) -> None:
        self.next_index = first_index
        self.end: pb.End | None = None
        self.cached_tokens = 0
        self._first_index = first_index
        self.end_sender = pb.WorkerRef()
        self._senders = {(sender.worker_id, sender.epoch) for sender in senders}
        self._waiting: list[int] = []
        self._changed = asyncio.Event()

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
        """
        if self.end is not None:
            return True
        ids = token_ids(message.token_ids)
        has_gap = message.index > self.next_index
        if not has_gap:
            fresh = ids[self.next_index - message.index :]
            self.next_index += len(fresh)
            self._waiting.extend(fresh)
            self.cached_tokens = max(self.cached_tokens, message.cached_tokens)
        is_failure = message.end.reason == pb.FINISH_REASON_FAILED
        if message.HasField("end") and (is_failure or not has_gap):
            self.end, self.end_sender = message.end, message.sender
            has_gap = False
        self._changed.set()
        return not has_gap

    def take(self) -> list[int]:
        """The tokens that arrived since the last call."""
        taken, self._waiting = self._waiting, []
        return taken

    async def wait(self, timeout_s: float) -> None:
        """Return when something has arrived that was not taken, or after timeout_s."""
        self._changed.clear()
        if self._waiting or self.end is not None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
