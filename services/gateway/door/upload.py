"""One request's body on its way in: how much and how long it may take, and how it is cut short.

A response that comes before the whole body closes the connection: what is left would be read, and
paid for, only to be thrown away.
"""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from services.gateway.failures import InvalidRequest

_MOST_DIGITS = 4000  # leading zeros are allowed, and Python reads 4,300 digits at most
_SMALL_BYTES = 64 << 10  # costs less to read than a new connection
# Who writes does not read yet, and what is left unread at the close loses the response. Reading on
# and dropping it is cheap; clients send what they have begun, if it is not endless.
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20  # or twice the limit


class Upload:
    """The body of one request; `receive` and `send` stand between server and application."""

    def __init__(self, headers: Headers, receive: Receive, send: Send, timeout_s: float) -> None:
        self._receive = receive
        self._send = send
        self._timeout_s = timeout_s
        self._ends_s = asyncio.get_running_loop().time() + timeout_s
        length = headers.get("content-length", "")
        is_number = length.isascii() and length.isdigit()
        self.announced = int(length[-_MOST_DIGITS:]) if is_number else None
        self._is_chunked = "transfer-encoding" in headers
        self._is_expecting = "expect" in headers  # once answered, its body may come or not
        self._is_whole = not self.announced and not self._is_chunked
        self._num_bytes = 0
        self._most = 0
        self._is_closing = False
        self.is_answered = False

    def check(self, max_bytes: int) -> None:
        """Raises InvalidRequest, 413, for a length beyond max_bytes, now or as soon as it is."""
        self._most = max_bytes
        if self.announced is not None and self.announced > max_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next message. Raises InvalidRequest, 408 or 413."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._ends_s):
                message = await self._receive()
        except TimeoutError:
            raise InvalidRequest(
                f"the body was not here within {self._timeout_s:g} s",
                code="request_timeout",
                status=408,
            ) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._most:
            raise self._too_large()
        self._is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass on a message of the response."""
        if message["type"] == "http.response.start":
            self.is_answered = True
            self._is_closing = not self._is_whole and self._must_close()
            if self._is_closing:
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        elif self._is_closing and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body"}
        await self._send(message)

    def _must_close(self) -> bool:
        is_endless = self._is_chunked or self._is_expecting
        return is_endless or (self.announced or 0) > _SMALL_BYTES

    async def _linger(self) -> None:
        """Until the client has stopped, let it find the response; a bounded time and size."""
        num_bytes, most = 0, max(_LINGER_BYTES, 2 * self._most)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while num_bytes < most:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest(
            f"the body has more than {self._most} bytes", code="request_too_large", status=413
        )
