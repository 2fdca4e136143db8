"""Opening Redis: what its URL and files must be, and how it fails.

redis-py's own time limit loses a cancellation that comes with an answer (Python 3.11), so whoever
asks sets the limit of each call with asyncio.timeout.
"""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.access import Access, has_login, place
from shared.errors import ConfigError


def open_redis(url: str, access: Access, *, connect_timeout_s: float) -> Any:  # a Redis
    """A client that has not connected yet. Raises ConfigError if URL or files cannot be used."""
    try:
        options = _options(url, access)
    except ValueError as error:
        raise ConfigError(f"no Redis can be at {place(url)}: {error}") from error
    try:
        return Redis.from_url(
            url,
            # redis-py 8 retries for 4.5 to 6 s by default before it says that a port is closed.
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=connect_timeout_s,
            **options,
        )
    except ValueError:  # what it says may hold a part of a password
        raise ConfigError(f"no Redis can be at {place(url)}: the URL cannot be used") from None


def _options(url: str, access: Access) -> dict[str, Any]:
    if access.has_tls_files and urlsplit(url).scheme != "rediss":
        raise ValueError("a CA or certificate file needs rediss://")
    files = {
        "ssl_ca_certs": access.ca_file,
        "ssl_certfile": access.cert_file,
        "ssl_keyfile": access.key_file,
    }
    options: dict[str, Any] = {
        option: str(_existing(file)) for option, file in files.items() if file is not None
    }
    if (login := access.login()) is not None:
        if has_login(url):
            raise ValueError("credentials stand in the URL and in a file")
        options |= {"username": login.user or None, "password": login.secret}
    return options


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    return file
