"""The listening socket's promises."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import uvicorn
from starlette.responses import PlainTextResponse

from services.gateway.config import GatewayConfig
from services.gateway.listener import listen, listening
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


async def test_an_idle_connection_is_kept_for_fifteen_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A client's pool that keeps one longer than the server finds it closed amid a request."""
    kept_s: list[int] = []

    class Recorded(uvicorn.Config):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            kept_s.append(self.timeout_keep_alive)

    monkeypatch.setattr(uvicorn, "Config", Recorded)
    config = GatewayConfig(host="127.0.0.1", port=0, nats_url="", checkpoint=tmp_path)
    async with listening(PlainTextResponse(""), config):
        assert kept_s == [900]


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


async def test_with_a_certificate_https_is_spoken_and_http_is_not(tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    pair.cert_chain_pems[0].write_to_path(cert)
    pair.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    config = secured(cert, key)
    async with listening(PlainTextResponse("hello"), config) as port:
        context = ssl.create_default_context(cafile=ca)
        async with httpx.AsyncClient(verify=context) as http:
            assert (await http.get(f"https://127.0.0.1:{port}/")).text == "hello"
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get(f"http://127.0.0.1:{port}/")
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await http.get(f"https://127.0.0.1:{port}/")


async def test_a_certificate_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nothing")
    for cert in ("cert.pem", "missing.pem"):
        with pytest.raises(ConfigError, match=cert):
            async with listening(
                PlainTextResponse(""), secured(tmp_path / cert, tmp_path / "cert.pem")
            ):
                pass


def secured(cert: Path, key: Path) -> GatewayConfig:
    return GatewayConfig(
        host="127.0.0.1",
        port=0,
        nats_url="",
        checkpoint=cert.parent,
        drain_s=1.0,
        tls_cert_file=cert,
        tls_key_file=key,
    )
