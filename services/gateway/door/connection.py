"""A connection that is given up when a request's head takes long, or has no end.

uvicorn waits for ever, and keeps all that comes; nobody has shown a key yet.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_S = 15.0
_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with bounds for what comes before a body."""

    _head_ends: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _is_in_head = True

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._head_ends = self.loop.call_later(_HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless it is a head without end."""
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        # Of what came with the head's end, a part may have been body: only an open head counts.
        if self._is_in_head and self._num_head_bytes > _HEAD_BYTES:
            self._give_up()

    def on_message_begin(self) -> None:
        """A head begins: the first one's time began with the connection."""
        self._is_in_head = True
        if self._head_ends is None:
            self._head_ends = self.loop.call_later(_HEAD_S, self._give_up)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        self._num_head_bytes = 0
        self._forget()
        super().on_headers_complete()

    def _forget(self) -> None:
        if self._head_ends is not None:
            self._head_ends.cancel()
            self._head_ends = None

    def _give_up(self) -> None:
        self._forget()
        self.transport.close()
