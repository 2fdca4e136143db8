"""An OpenAI-compatible server that costs almost nothing: what the peer proxies, and the client's
own speed is shown against.

Streams chat completions of `max_tokens` tokens, one event each, and looks at nothing else of a
request. Sends no faster than the client receives, as the mock fleet.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self

from benchmarks.gateway_speed.flow import CONTEXT, Flow, now_s

_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_NAME = re.compile(rb"bench-\d+")
_LENGTH = re.compile(rb"content-length: ?(\d+)", re.IGNORECASE)
_IDLE_S = 0.0002
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class MockServer:
    """The server's process; `port` is known inside the block."""

    def __init__(self, words: list[str], flow: Flow) -> None:
        """Answers are made of `words`, over and over."""
        self._pipe, there = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(there, words, flow), daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._process.start()
        self.port = self._pipe.recv()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()

    def pace(self, tokens_per_s: float) -> None:
        """So many tokens a second and stream from now on; 0 = as fast as they are taken."""
        self._pipe.send(tokens_per_s)

    def sent_s(self) -> Mapping[str, list[float]]:
        """When each token of each answer was sent since the last call, by the request's name."""
        self._pipe.send(None)
        return self._pipe.recv()


def _serve(pipe: Connection, words: list[str], flow: Flow) -> None:
    async def main() -> None:
        decode = _Decode([_chunk({"content": word}) for word in words], flow)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(decode), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        loop.add_reader(pipe.fileno(), decode.obey, pipe)
        await decode.run()

    asyncio.run(main())


@dataclass
class _Answer:
    name: str
    num_tokens: int
    sent_s: list[float] = field(default_factory=list)


class _Decode:
    """All streams' next tokens, step by step."""

    def __init__(self, chunks: list[bytes], flow: Flow) -> None:
        self._chunks = chunks
        self._flow = flow
        self._step_s = 0.0
        self._num_sent = 0
        self._live: dict[asyncio.Transport, _Answer] = {}
        self._told: list[_Answer] = []

    def obey(self, pipe: Connection) -> None:
        asked = pipe.recv()
        if asked is None:
            pipe.send({answer.name: answer.sent_s for answer in self._told})
            self._told.clear()
        else:
            self._step_s = 1 / asked if asked else 0.0

    def begin(self, transport: asyncio.Transport, answer: "_Answer") -> None:
        if not self._live:
            self._num_sent = self._flow.received.value
        transport.write(_HEAD + _chunk({"role": "assistant", "content": ""}))
        self._live[transport] = answer
        self._told.append(answer)
        self._send_next(transport)

    def drop(self, transport: asyncio.Transport) -> None:
        self._live.pop(transport, None)

    async def run(self) -> None:
        due_s = now_s()
        while True:
            if self._step_s:
                due_s = max(due_s + self._step_s, now_s() - self._step_s)
                await asyncio.sleep(due_s - now_s())
            elif not self._live or not self._flow.has_room(self._num_sent, len(self._live)):
                await asyncio.sleep(_IDLE_S)
                continue
            else:
                await asyncio.sleep(0)
            for transport in list(self._live):
                self._send_next(transport)

    def _send_next(self, transport: asyncio.Transport) -> None:
        answer = self._live[transport]
        chunk = self._chunks[len(answer.sent_s) % len(self._chunks)]
        answer.sent_s.append(now_s())
        self._num_sent += 1
        transport.write(chunk)
        if len(answer.sent_s) == answer.num_tokens:
            del self._live[transport]
            transport.write(_chunk({}, "length") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


class _Connection(asyncio.Protocol):
    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pending += data
        head, found, body = self._pending.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or length is None or len(body) < int(length[1]):
            return
        self._pending = b""
        asked, name = _MAX_TOKENS.search(body), _NAME.search(body)
        assert asked is not None, "the benchmark's requests name max_tokens"
        assert name is not None, "and themselves"
        self._decode.begin(self._transport, _Answer(name[0].decode(), int(asked[1])))

    def connection_lost(self, error: Exception | None) -> None:
        self._decode.drop(self._transport)


def _chunk(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    document = {
        "id": "chatcmpl-mock",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "mock",
        "choices": [choice],
    }
    event = b"data: %s\n\n" % json.dumps(document, separators=(",", ":")).encode()
    return b"%x\r\n%s\r\n" % (len(event), event)
