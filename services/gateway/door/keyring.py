"""The keys that open the door now: read from their file at the start, and again when it changes."""

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from services.gateway.door import keys
from services.gateway.door.keys import Caller, Key
from shared.access import read
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
Stamp = tuple[int, int, int]


class Keyring:
    """The keys of one file. Used on one event loop."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._file = file
        self._stamp = self._look()
        self._keys = self._read()

    def identify(self, given: Sequence[str]) -> Caller | None:
        """Who bears one of these keys; None if nobody may come in with them."""
        return keys.identify(self._keys, given, datetime.now(UTC))

    async def watch(self) -> None:
        """For ever read the file again when it has changed. A broken one changes nothing."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.renew()

    def renew(self) -> None:
        """Read the file again if it has changed since the last time."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%d API keys were read again", len(self._keys))

    def _look(self) -> Stamp | None:
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[Key, ...]:
        try:
            return keys.parse(read(self._file).decode())
        except UnicodeDecodeError:
            raise ConfigError(f"API keys in {self._file}: it is not UTF-8") from None
        except ConfigError as error:
            raise ConfigError(f"API keys in {self._file}: {error}") from None
