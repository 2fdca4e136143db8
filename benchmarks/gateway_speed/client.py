"""A client of many streams, cheap enough to be faster than what it measures.

One asyncio protocol a stream, which counts tokens by searching bytes and parses no JSON. It runs in
a process of its own: `with Client(flow) as client`.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self

from benchmarks.gateway_speed.flow import CONTEXT, Flow, now_s

TOKEN_MARK = "z"  # every token has one, and nothing else that is sent
_END = b"\r\n0\r\n\r\n"  # the last chunk of a chunked body
_MARK = TOKEN_MARK.encode()
_TOKEN_EVENT = re.compile(rb"%b[^\n]*\n" % _MARK)  # no more than one match in a line
_NUMBER = "{number}"
_PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Load:
    """Requests to one server, `num_streams` at once."""

    port: int
    bodies: Sequence[str]  # JSON, taken in turn; {number} in it becomes the request's own number
    num_streams: int = 1
    rounds: int = 1  # requests of each stream, one after the other on its connection
    first_number: int = 0
    spread_s: float = 0.0  # the streams begin over so long, evenly


@dataclass
class Heard:
    """One answer: when its request was sent, and when each token arrived."""

    number: int
    sent_s: float
    arrived_s: list[float] = field(default_factory=list)
    num_token_events: int = 0


def name_of(number: int) -> str:
    """What a request calls itself, in its header."""
    return f"bench-{number}"


class Client:
    """The client's process."""

    def __init__(self, flow: Flow) -> None:
        self._pipe, there = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(there, flow), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()

    def load(self, load: Load) -> list[Heard]:
        """Send it and read every answer to its end; raises RuntimeError if one is an error."""
        self._pipe.send(load)
        heard = self._pipe.recv()
        if isinstance(heard, str):
            raise RuntimeError(heard)
        return heard


def _serve(pipe: Connection, flow: Flow) -> None:
    while True:
        try:
            answer = asyncio.run(_run(pipe.recv(), flow))
        except (RuntimeError, OSError) as error:
            answer = str(error)
        pipe.send(answer)


async def _run(load: Load, flow: Flow) -> list[Heard]:
    async def stream(place: int) -> list[Heard]:
        await asyncio.sleep(load.spread_s * place / load.num_streams)
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(
            lambda: _Stream(flow), "127.0.0.1", load.port
        )
        try:
            return [
                await protocol.ask(load, load.first_number + load.num_streams * number + place)
                for number in range(load.rounds)
            ]
        finally:
            transport.close()

    flow.received.value = 0
    answers = await asyncio.gather(*map(stream, range(load.num_streams)))
    return [heard for stream_heard in answers for heard in stream_heard]


class _Stream(asyncio.Protocol):
    """One connection; requests follow one another."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._rest = b""
        self._is_told_done = False
        self._heard = Heard(0, 0.0)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, load: Load, number: int) -> Heard:
        """Send one request, and read its answer."""
        body = load.bodies[number % len(load.bodies)].replace(_NUMBER, str(number)).encode()
        head = (
            f"POST {_PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer none\r\n"
            f"x-request-id: {name_of(number)}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._done, self._is_told_done = asyncio.get_running_loop().create_future(), False
        self._heard = Heard(number, now_s())
        self._transport.write(head.encode() + body)
        await self._done
        return self._heard

    def data_received(self, data: bytes) -> None:
        now = now_s()
        pending = self._rest + data
        if pending.startswith(b"HTTP/1.1 ") and not pending.startswith(b"HTTP/1.1 200"):
            self._fail(pending)
            return
        cut = pending.rfind(b"\n\n") + 2
        whole, self._rest = (pending[:cut], pending[cut:]) if cut >= 2 else (b"", pending)
        num_tokens = whole.count(_MARK)
        self._heard.arrived_s += [now] * num_tokens
        self._heard.num_token_events += len(_TOKEN_EVENT.findall(whole))
        self._flow.note(num_tokens)
        self._is_told_done |= b"data: [DONE]" in whole
        if self._rest.endswith(_END):
            self._end(pending)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"the server closed a stream: {error}"))

    def _end(self, pending: bytes) -> None:
        self._rest = b""
        if not self._is_told_done:
            self._fail(pending)
        elif not self._done.done():
            self._done.set_result(None)

    def _fail(self, pending: bytes) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"a stream failed: {pending[-500:]!r}"))
