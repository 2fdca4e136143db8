"""The stack's own secret: without it, other users of the machine could write on its bus.

It stands in files that only their owner can read, never in a command line, and ends with the stack.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.local.servers import NATS_CONF

_BYTES = 32


@dataclass(frozen=True)
class Files:
    """Where the secret stands: for those who show it, and for the servers that ask for it."""

    secret: Path
    nats_conf: Path
    redis_conf: Path


def files(folder: Path) -> Files:
    """The files of the stack that has the folder."""
    return Files(folder / "secret", folder / "nats.conf", folder / "redis.conf")


@contextmanager
def made(folder: Path) -> Iterator[str]:
    """A fresh secret inside the block."""
    places = files(folder)
    secret = secrets.token_urlsafe(_BYTES)
    # NATS reads an included path as one beside the file that includes it.
    limits = os.path.relpath(NATS_CONF, folder.resolve())
    contents = {
        places.secret: secret,
        places.nats_conf: f'include "{limits}"\nauthorization {{token: "{secret}"}}\n',
        places.redis_conf: f"requirepass {secret}\n",
    }
    try:
        for place, content in contents.items():
            place.unlink(missing_ok=True)  # an older one may be open to others
            place.touch(0o600, exist_ok=False)
            place.write_text(content)
        yield secret
    finally:
        for place in contents:
            place.unlink(missing_ok=True)
