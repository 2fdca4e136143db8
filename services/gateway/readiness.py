"""Whether requests can be served: from what the fleet says, and from the bus being there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from services.gateway.attempt import Line
from shared import farspan_pb2 as pb

_WATCH_S = 0.25
_STALL_S = 1.0  # a loop that stood still this long has unread heartbeats: silence proves nothing


class Readiness:
    """Whether requests can be served; written by the event loop, read by the probe's thread too."""

    def __init__(self) -> None:
        self._state: tuple[bool, str] = (False, "starting")
        self._is_draining = False

    def note(self, missing: str) -> None:
        """Ready when nothing is missing."""
        self._state = (not missing, missing or "ready")

    def drain(self) -> None:
        """Not ready from now on."""
        self._is_draining = True

    def read(self) -> tuple[bool, str]:
        """Ready or not, and why."""
        return (False, "draining") if self._is_draining else self._state


def hearing(line: Line, readiness: Readiness) -> Callable[[pb.Heartbeat], Awaitable[None]]:
    """Takes heartbeats in; ready as soon as there is nothing missing."""

    async def hear(heartbeat: pb.Heartbeat) -> None:
        line.fleet.hear(heartbeat, line.clock())
        if not readiness.read()[0]:
            _note(line, readiness)

    return hear


def _note(line: Line, readiness: Readiness) -> None:
    is_connected = line.bus.is_connected
    readiness.note(line.fleet.missing(line.clock()) if is_connected else "NATS is not connected")


@asynccontextmanager
async def watching(line: Line, readiness: Readiness) -> AsyncIterator[None]:
    """Inside the block readiness is kept true, and silence that proves nothing is forgiven."""

    async def watch() -> None:
        while True:
            before_s = line.clock()
            await asyncio.sleep(_WATCH_S)
            now_s = line.clock()
            if not line.bus.is_connected or now_s - before_s > _WATCH_S + _STALL_S:
                line.fleet.forgive(now_s)
            _note(line, readiness)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
