"""Opening Redis: what its URL and CA file must be, and how it fails.

redis-py's own time limit loses a cancellation that comes with an answer (Python 3.11), so whoever
asks sets the limit of each call with asyncio.timeout.
"""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.errors import ConfigError


def open_redis(url: str, ca_file: Path | None, *, connect_timeout_s: float) -> Any:  # a Redis
    """A client that has not connected yet. Raises ConfigError if URL or file cannot be used."""
    options: dict[str, Any] = {} if ca_file is None else {"ssl_ca_certs": str(ca_file)}
    try:
        if ca_file is not None and urlsplit(url).scheme != "rediss":
            raise ValueError("a CA file needs rediss://")
        if ca_file is not None and not ca_file.is_file():
            raise ValueError(f"there is no CA file {ca_file}")
        return Redis.from_url(
            url,
            # redis-py 8 retries for 4.5 to 6 s by default before it says that a port is closed.
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=connect_timeout_s,
            **options,
        )
    except ValueError as error:
        raise ConfigError(f"no Redis can be at {place(url)}: {error}") from error


def place(url: str) -> str:
    """Where Redis is expected, without a password."""
    return urlsplit(url).netloc.rpartition("@")[2] or "the given URL"
