"""One HTTP response on the ASGI wire: a JSON document, or a stream of server-sent events.

Knows bytes and headers, nothing of generation. Plain asyncio: a cancelled request can still tell
its workers so, which Starlette's own streaming response, built on re-cancelling scopes, does not
allow.
"""

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from starlette.types import Message, Receive, Send

from services.gateway.dialects.dialect import Event
from services.gateway.failures import InvalidRequest
from shared.errors import Cancelled

T = TypeVar("T")

_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_KEEP_ALIVE_S = 15.0  # proxies give up on a silent stream after 30 to 60 s


class ClientGone(Cancelled):
    """The client closed its connection; there is nobody to answer."""


class Response:
    """What is sent for one request: `send_json`, or `begin_stream`, events and `end_stream`."""

    def __init__(self, send: Send, keep_alive: bytes) -> None:
        """`keep_alive` is what an API's silent stream says."""
        self._send = send
        self._keep_alive = keep_alive
        self.is_lagging = False  # the client reads more slowly than it is written to
        self._last_write_s = 0.0
        self.is_stream = False
        self.is_ended = False

    async def send_json(
        self, status: int, body: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole response; `body` is a document, or JSON already."""
        data = body if isinstance(body, bytes) else dump(body)
        length = {"content-type": "application/json", "content-length": str(len(data))}
        await self._start(status, {**length, **(headers or {})})
        await self._write(data, is_last=True)

    async def begin_stream(self) -> None:
        """Status and headers of an event stream."""
        self.is_stream = True
        await self._start(200, _SSE_HEADERS)

    async def events(self, events: Sequence[Event]) -> None:
        """All in one write; nothing where there is no stream."""
        if events and self.is_stream:
            await self._write(b"".join(map(encoded, events)))

    async def keep_alive(self) -> None:
        """A sign of life, if a stream has been silent for a while."""
        if self.is_stream and time.monotonic() - self._last_write_s > _KEEP_ALIVE_S:
            await self._write(self._keep_alive)

    async def end_stream(self, last: bytes = b"") -> None:
        """The end of the stream."""
        await self._write(last, is_last=True)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        encoded = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]
        self._last_write_s = time.monotonic()
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        self._last_write_s = time.monotonic()
        self.is_ended = is_last
        self.is_lagging = False
        waited = asyncio.get_running_loop().call_soon(self._lag)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        finally:
            waited.cancel()  # before the loop's next turn, unless the client had to be waited for

    def _lag(self) -> None:
        self.is_lagging = True


def encoded(event: Event) -> bytes:
    """An event on the wire."""
    data = b"data: %b\n\n" % dump(event.data)
    return b"event: %b\n%b" % (event.name.encode(), data) if event.name else data


def dump(document: Any) -> bytes:
    """Compact JSON; text stays readable."""
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError:  # a lone surrogate, in words that a client sent
        return json.dumps(document).encode()


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The body. Raises InvalidRequest beyond max_bytes, ClientGone if the client leaves."""
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left")
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"the body has more than {max_bytes} bytes", code="request_too_large", status=413
            )
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def until_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of work. Raises ClientGone if the client leaves first, once work has cleaned up.

    Call it after the body was read: then the only message left to receive is the disconnect.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("the client left")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> Message:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message
