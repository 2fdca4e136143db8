"""The HTTP server: a socket that sends at once, and uvicorn without its own idea of signals.

Knows ports and connections; what is served is elsewhere.
"""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from services.gateway.config import GatewayConfig
from services.gateway.door.connection import Connection
from shared.errors import ConfigError

_BACKLOG = 2048
_KEEP_ALIVE_S = (
    900  # longer than a client's pool keeps a connection, so that the client closes first
)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process's own decide when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


@asynccontextmanager
async def listening(app: ASGIApp, config: GatewayConfig) -> AsyncIterator[int]:
    """Serve inside the block; yields the port. Leaving it finishes the requests in flight.

    What outlasts the drain, or a second wish to stop, is cancelled: it tells client and workers.
    Raises ConfigError for an address or a certificate that cannot be had.
    """
    settings = uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.drain_s),
        proxy_headers=False,  # whoever sends them could name any address
        ws="none",
        ssl_certfile=config.tls_cert_file,
        ssl_keyfile=config.tls_key_file,
    )
    _load(settings)
    listener = listen(config.host, config.port)
    server = _Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    except asyncio.CancelledError:
        # Both wishes came at once. The task has its cancellation already: nobody will interrupt us.
        serving.cancel()
        raise
    finally:
        server.should_exit = True
        try:
            await serving
        except asyncio.CancelledError:
            for task in server.server_state.tasks:
                task.cancel()
            raise
        finally:
            await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
            listener.close()


def _load(settings: uvicorn.Config) -> None:
    """Read the certificate. Raises ConfigError for one that cannot be used."""
    try:
        settings.load()
    except OSError as error:  # ssl.SSLError too
        files = f"{settings.ssl_certfile}, {settings.ssl_keyfile}"
        raise ConfigError(f"cannot use for TLS: {files}: {error.strerror}") from error


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had.

    asyncio sets TCP_NODELAY on accepted connections only if the listener names its protocol, which
    socket.create_server does not; without it the first token waits 40 ms for the headers' ACK.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
