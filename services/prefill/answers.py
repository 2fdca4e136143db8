"""What a prefill worker tells gateways: first tokens, kept for a resend, and ends, repeated.

An end is a request, repeated until it was heard or nobody can be waiting for it any more.
"""

import asyncio
import logging
import time
from collections import OrderedDict

from shared import farspan_pb2 as pb
from shared import subjects
from shared.bus import Bus
from shared.errors import FarspanError

logger = logging.getLogger(__name__)

_NUM_KEPT = 4096  # minutes of first tokens; a lost one is asked for within a second
_KEPT_BYTES = 256 << 20  # logprobs of a prompt may be 16 MB
_END_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_AFTER_DEADLINE_S = 5.0  # a gateway gives up by itself at the deadline


class Answers:
    """All answers begun here, whoever continues them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kept: OrderedDict[str, tuple[str, pb.Tokens]] = OrderedDict()
        self._kept_bytes = 0

    async def first(self, message: pb.Tokens, gateway_id: str) -> None:
        """Send a request's first token, and keep the message, which must not change any more."""
        self._drop(message.request_id)
        self._kept[message.request_id] = (gateway_id, message)
        self._kept_bytes += message.ByteSize()
        while len(self._kept) > _NUM_KEPT or self._kept_bytes > _KEPT_BYTES:
            self._drop(next(iter(self._kept)))
        await self._send(message, gateway_id)

    async def resend(self, wanted: pb.ResendTokens) -> None:
        """Send a first token again; what is not known, or not wanted, is ignored."""
        gateway_id, message = self._kept.get(wanted.request_id, ("", pb.Tokens()))
        if gateway_id and wanted.from_index <= message.index:
            await self._send(message, gateway_id)

    def _drop(self, request_id: str) -> None:
        _, message = self._kept.pop(request_id, ("", pb.Tokens()))
        self._kept_bytes -= message.ByteSize()

    async def _send(self, message: pb.Tokens, gateway_id: str) -> None:
        batch = pb.TokenBatch(messages=[message])
        await self._bus.publish(subjects.TOKENS, batch, gateway=gateway_id)

    async def end(self, submit: pb.Submit, answer: pb.Tokens, end: pb.End) -> None:
        """Send the end with the whole answer of this attempt, so that nothing can be missing."""
        message = pb.Tokens(end=end, cached_tokens=end.usage.cached_tokens)
        message.MergeFrom(answer)
        give_up_s = submit.deadline_unix_ms / 1000 + _AFTER_DEADLINE_S
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._bus.request(
                    subjects.TOKENS_END,
                    message,
                    timeout_s=_END_TIMEOUT_S,
                    gateway=submit.gateway_id,
                )
            except FarspanError as error:
                if time.time() > give_up_s:
                    logger.warning("%s: its end was not heard: %s", submit.request_id, error)
                    return
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
