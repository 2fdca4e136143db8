"""What a prefill worker tells gateways: first tokens, kept for a resend, and ends, repeated.

An end is a request, repeated until it was heard or nobody can be waiting for it any more.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import token_bytes
from shared.bus import Bus
from shared.errors import FarspanError

logger = logging.getLogger(__name__)

_NUM_KEPT = 4096  # minutes of first tokens; a lost one is asked for within a second
_END_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_AFTER_DEADLINE_S = 5.0  # a gateway gives up by itself at the deadline


class Answers:
    """All answers begun here, whoever continues them."""

    def __init__(self, bus: Bus, worker: pb.WorkerRef) -> None:
        self._bus = bus
        self._worker = worker
        self._kept: OrderedDict[str, tuple[str, pb.Tokens]] = OrderedDict()

    async def first(self, submit: pb.Submit, token_id: int, num_cached_tokens: int) -> None:
        """Send a request's first token, and keep it."""
        message = pb.Tokens(
            request_id=submit.request_id,
            sender=self._worker,
            index=submit.num_resumed_tokens,
            token_ids=token_bytes([token_id]),
            cached_tokens=num_cached_tokens,
        )
        self._kept[submit.request_id] = (submit.gateway_id, message)
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        await self._send(message, submit.gateway_id)

    async def resend(self, wanted: pb.ResendTokens) -> None:
        """Send a first token again; what is not known, or not wanted, is ignored."""
        gateway_id, message = self._kept.get(wanted.request_id, ("", pb.Tokens()))
        if gateway_id and wanted.from_index <= message.index:
            await self._send(message, gateway_id)

    async def _send(self, message: pb.Tokens, gateway_id: str) -> None:
        batch = pb.TokenBatch(messages=[message])
        await self._bus.publish(subjects.TOKENS, batch, gateway=gateway_id)

    async def end(self, submit: pb.Submit, token_ids: Sequence[int], end: pb.End) -> None:
        """Send the end with the whole answer of this attempt, so that nothing can be missing."""
        message = pb.Tokens(
            request_id=submit.request_id,
            sender=self._worker,
            index=submit.num_resumed_tokens,
            token_ids=token_bytes(token_ids),
            end=end,
            cached_tokens=end.usage.cached_tokens,
        )
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
