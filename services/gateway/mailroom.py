"""Brings workers' token messages to the inboxes of the live requests, over the bus.

Knows requests by id only. A gap is asked for again at once; an end is answered with the index
still needed, and a request that is over is answered as complete, so that its sender stops
repeating it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.inbox import Inbox
from shared import farspan_pb2 as pb
from shared import subjects
from shared.bus import Bus
from shared.errors import FarspanError

# An End may overtake the tokens before it, which come by another subject.
_OVERTAKING_S = 0.02
_NUM_OVERTAKING_CHECKS = 10


class Mailroom:
    """The inboxes of one gateway's live attempts. Use on one event loop."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inboxes: dict[str, Inbox] = {}

    @asynccontextmanager
    async def open(self, gateway_id: str) -> AsyncIterator[None]:
        """Inside the block, token messages for this gateway are delivered."""
        async with (
            self._bus.listen(subjects.TOKENS, self._deliver, gateway=gateway_id),
            self._bus.answer(subjects.TOKENS_END, self._finish, gateway=gateway_id),
        ):
            yield

    def add(self, request_id: str, inbox: Inbox) -> None:
        """Deliver this attempt's messages from now on."""
        self._inboxes[request_id] = inbox

    def remove(self, request_id: str) -> None:
        """Deliver no more; removing twice is harmless."""
        self._inboxes.pop(request_id, None)

    @property
    def num_open(self) -> int:
        """How many attempts are live."""
        return len(self._inboxes)

    async def _deliver(self, batch: pb.TokenBatch) -> None:
        for message in batch.messages:
            inbox = self._inbox(message)
            if inbox is not None and not _accepted(inbox, message):
                await self._ask_again(message, inbox)

    async def _finish(self, message: pb.Tokens) -> pb.TokensReply:
        inbox = self._inbox(message)
        if inbox is None:
            num_tokens = len(message.token_ids) // 4
            return pb.TokensReply(next_index=message.index + num_tokens)
        for _ in range(_NUM_OVERTAKING_CHECKS):
            if message.index <= inbox.next_index:
                break
            await asyncio.sleep(_OVERTAKING_S / _NUM_OVERTAKING_CHECKS)
        is_whole = _accepted(inbox, message)
        if not is_whole and inbox.is_empty:
            await self._ask_again(message, inbox)
        return pb.TokensReply(next_index=inbox.next_index)

    async def _ask_again(self, message: pb.Tokens, inbox: Inbox) -> None:
        # Before anything has arrived the lost message may be prefill's, not the sender's.
        asked = inbox.sender_ids if inbox.is_empty else [message.sender.worker_id]
        resend = pb.ResendTokens(request_id=message.request_id, from_index=inbox.next_index)
        for worker_id in asked:
            await self._bus.publish(subjects.RESEND_TOKENS, resend, worker=worker_id)

    def _inbox(self, message: pb.Tokens) -> Inbox | None:
        inbox = self._inboxes.get(message.request_id)
        return inbox if inbox is not None and inbox.trusts(message.sender) else None


def _accepted(inbox: Inbox, message: pb.Tokens) -> bool:
    try:
        return inbox.accept(message)
    except FarspanError as error:
        inbox.fail(error.as_failure(), message.sender)
        return True
