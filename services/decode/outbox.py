"""Tokens on their way to gateways: what a step gave in one message each.

A message a token would cost the bus and the gateway more than the tokens do.
"""

import asyncio
from collections import defaultdict

from shared import farspan_pb2 as pb
from shared import subjects
from shared.bus import Bus


class Outbox:
    """Collects for one turn of the event loop. Used on it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._batches: defaultdict[str, pb.TokenBatch] = defaultdict(pb.TokenBatch)
        self._has_some = asyncio.Event()

    def put(self, message: pb.Tokens, gateway_id: str) -> None:
        """Send it with what else is put in this turn."""
        self._batches[gateway_id].messages.append(message)
        self._has_some.set()

    async def send(self) -> None:
        """For ever send what was put."""
        while True:
            # Who waits here is woken in the turn after the first `put`: all requests that a step
            # gave a token have been woken in one turn before that.
            await self._has_some.wait()
            self._has_some.clear()
            batches, self._batches = self._batches, defaultdict(pb.TokenBatch)
            for gateway_id, batch in batches.items():
                await self._bus.publish(subjects.TOKENS, batch, gateway=gateway_id)
