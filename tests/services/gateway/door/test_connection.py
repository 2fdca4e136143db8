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
