"""Log lines: one JSON object a line, on stderr. Never prompt text, never a secret."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """A record as one JSON object; line breaks inside a message cannot forge a second line."""

    def __init__(self, service: str, fields: Callable[[], Mapping[str, str]]) -> None:
        super().__init__()
        self._service = service
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII: what else a terminal obeys is not sent to it


@contextmanager
def to_stderr(service: str, fields: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Send the process's log lines of level INFO and above to stderr, inside the block.

    `fields` is asked at each line for what ties it to its surroundings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service, fields))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
