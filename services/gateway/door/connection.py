"""A connection that is given up when what is not a body takes long, or has no end.

uvicorn waits for ever, and keeps all that comes: heads, the extensions of chunks, and what trails
after the last of them. Nobody has shown a key yet.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_S = 15.0
_LOOSE_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with bounds for what comes before, between and after bodies."""

    _head_ends: asyncio.TimerHandle | None = None
    _num_loose_bytes = 0  # that came since the last part of a body, or since a head's end

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._head_ends = self.loop.call_later(_HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless it is loose and without end."""
        self._num_loose_bytes += len(data)
        super().data_received(data)
        if self._num_loose_bytes > _LOOSE_BYTES:
            self._give_up()

    def on_message_begin(self) -> None:
        """A head begins: the first one's time began with the connection."""
        if self._head_ends is None:
            self._head_ends = self.loop.call_later(_HEAD_S, self._give_up)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._num_loose_bytes = 0
        self._forget()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._num_loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole, its trailers too."""
        self._num_loose_bytes = 0
        super().on_message_complete()

    def _forget(self) -> None:
        if self._head_ends is not None:
            self._head_ends.cancel()
            self._head_ends = None

    def _give_up(self) -> None:
        self._forget()
        self.transport.close()
