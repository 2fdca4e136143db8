"""Is a process there, and is it ready?"""

import asyncio
import socket

import httpx

from services.local.plan import HOST, Spec
from shared.errors import ConfigError

_TIMEOUT_S = 2.0


async def unready(spec: Spec) -> str | None:
    """Why the process is not ready yet; None if it is."""
    if spec.has_probe:
        return await unready_service(spec.port)
    return await _unreachable(spec.port)


async def unready_service(port: int) -> str | None:
    """What a service's /readyz says against it; None if it is ready."""
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            answer = await client.get(f"http://{HOST}:{port}/readyz")
    except httpx.TransportError:
        return "starting"
    if answer.is_success:
        return None
    return str(answer.json()["reason"])


async def _unreachable(port: int) -> str | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(HOST, port)
    except (OSError, TimeoutError):
        return "starting"
    writer.close()
    return None


def require_free(host: str, port: int) -> None:
    """Raise ConfigError if there is no such port, or somebody listens on it already."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} does not exist: choose one from 0 to 65535 with --port")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} is taken ({error.strerror}): choose another with --port"
            ) from error
