import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from services.gateway.config import GatewayConfig
from services.gateway.door import connection
from services.gateway.listener import listening

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Streams]:
    """A connection to a gateway that answers everything."""
    monkeypatch.setattr(connection, "_HEAD_S", 0.2)
    config = GatewayConfig(host="127.0.0.1", port=0, nats_url="", checkpoint=tmp_path, drain_s=1.0)
    async with listening(PlainTextResponse("hello"), config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(3):
        with contextlib.suppress(ConnectionError):
            return await reader.read(1) == b""
        return True


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: g\r\nX: "])
async def test_a_head_that_does_not_end_is_not_awaited_for_ever(
    begun: bytes, streams: Streams
) -> None:
    reader, writer = streams
    writer.write(begun)

    assert await is_closed(reader)


async def test_a_head_without_end_is_not_kept(streams: Streams) -> None:
    reader, writer = streams
    writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * (65 << 10))

    assert await is_closed(reader)


CHUNKED = b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "endless",
    [(b"0\r\nX: ", b"x" * (80 << 10)), (b"0\r\n", b"a: b\r\n" * 9999), (b"5;", b"x" * (80 << 10))],
)
async def test_what_trails_a_body_without_end_is_not_kept(
    endless: tuple[bytes, bytes], streams: Streams
) -> None:
    """uvicorn keeps every trailer, and joins one that grows by copying it."""
    reader, writer = streams
    begun, more = endless
    writer.write(CHUNKED + b"3\r\nabc\r\n" + begun)
    await asyncio.sleep(0.05)  # what comes in one piece with a body's part is not counted
    for _ in range(4):
        writer.write(more)
    async with asyncio.timeout(3):
        with contextlib.suppress(ConnectionError):
            await reader.read()  # the answer, which needs no body, and then the end


async def test_a_long_body_is_no_loose_end(streams: Streams) -> None:
    """However it is cut, and with a trailer that ends."""
    reader, writer = streams
    chunks = b"400\r\n" + b"x" * 1024 + b"\r\n"
    writer.write(CHUNKED + chunks * 512 + b"0\r\nX: y\r\n\r\n")
    async with asyncio.timeout(3):
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
    writer.write(b"GET / HTTP/1.1\r\nHost: g\r\n\r\n")
    async with asyncio.timeout(3):
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")


async def test_between_two_requests_a_connection_may_rest(streams: Streams) -> None:
    """Clients keep connections for minutes; only a head has to come at once."""
    reader, writer = streams
    for _ in range(2):
        writer.write(b"GET / HTTP/1.1\r\nHost: g\r\n\r\n")
        async with asyncio.timeout(3):
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.3)
    writer.write(b"GET / HTTP/1.1\r\n")

    assert await is_closed(reader)


async def test_a_long_body_is_no_long_head(streams: Streams) -> None:
    reader, writer = streams
    writer.write(b"POST / HTTP/1.1\r\nHost: g\r\nContent-Length: 200000\r\n\r\n" + bytes(200_000))
    async with asyncio.timeout(3):
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
