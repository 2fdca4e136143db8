"""One answer on its way to its gateway: tokens as they come, then one end until it is answered.

Delivery on the bus is at most once, so all tokens are kept and resent from any index asked for.
"""

import asyncio
import logging
import time

from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import token_bytes
from shared.bus import Bus
from shared.errors import FarspanError

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 2.0
_PAUSE_S = 0.25
_GRACE_S = 10.0  # after the deadline; a gateway that is gone then will not come back


class TokenStream:
    """The tokens of one attempt, prefill's first one included."""

    def __init__(self, bus: Bus, worker: pb.WorkerRef, offer: pb.HandoffOffer) -> None:
        self._bus = bus
        self._worker = worker
        self._request_id = offer.request_id
        self._gateway_id = offer.gateway_id
        self._first_index = offer.num_resumed_tokens
        self._give_up_at_s = offer.deadline_unix_ms / 1000 + _GRACE_S
        self._tokens: list[int] = []
        self._num_sent = 0
        self._cached_tokens = 0

    @property
    def num_tokens(self) -> int:
        """The whole answer so far, resumed tokens included."""
        return self._first_index + len(self._tokens)

    def begin(self, first_token_id: int, cached_tokens: int) -> None:
        """The first token, which prefill has sent."""
        self._tokens = [first_token_id]
        self._num_sent = 1
        self._cached_tokens = cached_tokens

    def add(self, token_id: int) -> None:
        """Keep the next token for `flush` or `finish`."""
        self._tokens.append(token_id)

    async def flush(self) -> None:
        """Send the tokens that were not sent yet."""
        await self._send(self._first_index + self._num_sent)
        self._num_sent = len(self._tokens)

    async def resend(self, from_index: int) -> None:
        """Send again what was sent, from this index on."""
        if self._first_index <= from_index < self._first_index + self._num_sent:
            await self._send(from_index)

    async def finish(self, end: pb.End) -> None:
        """Send what is left, with the end; repeat until the gateway has everything.

        A gateway that does not answer until some time after the deadline is taken for gone.
        """
        next_index = self._first_index + self._num_sent
        while True:
            self._num_sent = len(self._tokens)
            message = self._message(next_index)
            message.end.CopyFrom(end)
            try:
                reply = await self._bus.request(
                    subjects.TOKENS_END,
                    message,
                    timeout_s=_END_TIMEOUT_S,
                    gateway=self._gateway_id,
                )
            except FarspanError as error:
                if time.time() > self._give_up_at_s:
                    logger.warning(
                        "request %s: no gateway took its end: %s", message.request_id, error
                    )
                    return
                await asyncio.sleep(_PAUSE_S)
                continue
            # After a failure the next attempt continues from what the gateway has.
            if reply.next_index >= self.num_tokens or end.reason == pb.FINISH_REASON_FAILED:
                return
            if reply.next_index == next_index:
                await asyncio.sleep(_PAUSE_S)
            next_index = max(reply.next_index, self._first_index)

    async def _send(self, index: int) -> None:
        message = self._message(index)
        if message.token_ids:
            batch = pb.TokenBatch(messages=[message])
            await self._bus.publish(subjects.TOKENS, batch, gateway=self._gateway_id)

    def _message(self, index: int) -> pb.Tokens:
        place = index - self._first_index
        return pb.Tokens(
            request_id=self._request_id,
            sender=self._worker,
            index=index,
            token_ids=token_bytes(self._tokens[place:]),
            cached_tokens=self._cached_tokens if place == 0 else 0,
        )
