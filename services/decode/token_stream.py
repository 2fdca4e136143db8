"""One answer on its way to its gateway: tokens as they come, then one end until it is answered.

Delivery on the bus is at most once, so all tokens are kept and resent from any index asked for.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from services.decode.outbox import Outbox
from shared import farspan_pb2 as pb
from shared import logprobs, subjects
from shared.block_hash import token_bytes
from shared.bus import Bus
from shared.errors import FarspanError

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 2.0
_PAUSE_S = 0.25
_GRACE_S = 10.0  # after the deadline; a gateway that is gone then will not come back


class TokenStream:
    """The tokens of one attempt, prefill's first one included."""

    def __init__(
        self, bus: Bus, outbox: Outbox, worker: pb.WorkerRef, offer: pb.HandoffOffer
    ) -> None:
        self._bus = bus
        self._worker = worker
        self._request_id = offer.request_id
        self._gateway_id = offer.gateway_id
        self._first_index = offer.num_resumed_tokens
        self._give_up_at_s = offer.deadline_unix_ms / 1000 + _GRACE_S
        self._outbox = outbox
        self._tokens: list[int] = []
        self._logprobs: list[pb.TokenLogprobs] = []  # of each token, if they are asked for
        self._num_sent = 0
        self._cached_tokens = 0

    @property
    def num_tokens(self) -> int:
        """The whole answer so far, resumed tokens included."""
        return self._first_index + len(self._tokens)

    def begin(self, done: pb.PrefillDone) -> None:
        """The first token, which prefill has sent."""
        self._tokens = [done.first_token_id]
        if done.HasField("first_logprobs"):
            self._logprobs = [done.first_logprobs]
        self._num_sent = 1
        self._cached_tokens = done.num_cached_tokens

    def add(self, token_id: int, told: pb.TokenLogprobs | None) -> None:
        """Keep the next token for `flush` or `finish`."""
        self._tokens.append(token_id)
        if told is not None:
            self._logprobs.append(told)

    def flush(self) -> None:
        """Send the tokens that were not sent yet, with those of other answers."""
        self._outbox.put(self._message(self._first_index + self._num_sent), self._gateway_id)
        self._num_sent = len(self._tokens)

    async def resend(self, from_index: int) -> None:
        """Send again what was sent, from this index on."""
        if self._first_index <= from_index < self._first_index + self._num_sent:
            batch = pb.TokenBatch(messages=[self._message(from_index)])
            await self._bus.publish(subjects.TOKENS, batch, gateway=self._gateway_id)

    async def finish(self, end: pb.End, stages: Sequence[pb.Stage]) -> None:
        """Send what is left, with the end; repeat until the gateway has everything.

        A gateway that does not answer until some time after the deadline is taken for gone.
        """
        next_index = self._first_index + self._num_sent
        while True:
            self._num_sent = len(self._tokens)
            message = self._message(next_index)
            message.end.CopyFrom(end)
            message.stages.extend(stages)
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

    def _message(self, index: int) -> pb.Tokens:
        place = index - self._first_index
        told = self._logprobs[place:]
        return pb.Tokens(
            request_id=self._request_id,
            sender=self._worker,
            index=index,
            token_ids=token_bytes(self._tokens[place:]),
            cached_tokens=self._cached_tokens if place == 0 else 0,
            logprobs=logprobs.joined(told) if told else None,
        )
