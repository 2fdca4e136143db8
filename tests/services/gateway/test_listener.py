"""The listening socket's promises."""

import asyncio
import socket

import pytest

from services.gateway.listener import listen
from shared.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_accepted_connections_send_at_once(host: str) -> None:
    """A token that waits for the ACK of the headers before it comes 40 ms late."""
    options: asyncio.Queue[int] = asyncio.Queue()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        options.put_nowait(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()
        await writer.wait_closed()

    listener = listen(host, 0)
    async with await asyncio.start_server(accept, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])

        assert await options.get()
        writer.close()
        await writer.wait_closed()


def test_a_taken_port_is_named() -> None:
    """The operator chooses another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_an_unknown_host_is_named() -> None:
    """So is an address that is not ours."""
    with pytest.raises(ConfigError, match="cannot listen"):
        listen("host.invalid", 80)
