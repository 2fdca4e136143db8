"""TLS in front of a server that was built without it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import trustme


@asynccontextmanager
async def tls_front(url: str, ca_file: Path) -> AsyncIterator[int]:
    """Yields the port of 127.0.0.1 that speaks TLS; who may be trusted is written to ca_file."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(ca_file)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    behind = urlsplit(url)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(behind.hostname, behind.port)
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]
