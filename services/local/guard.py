"""Ends a stack's processes if the process that started them dies without doing so.

Runs as a script of its own, in its own session. Its standard input says which process groups exist
("+123", "-123"); end of input without "done" means that the starter was killed.
"""

import os
import signal
import sys
import time
from contextlib import suppress

_GRACE_S = 3.0


def watch() -> None:
    """Read until the end of input, then end what is left."""
    groups: list[int] = []
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        if word.startswith("+"):
            groups.append(int(word[1:]))
        elif word.startswith("-"):
            groups.remove(int(word[1:]))
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, number)
        deadline = time.monotonic() + _GRACE_S
        while any(map(_is_alive, groups)) and time.monotonic() < deadline:
            time.sleep(0.05)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    watch()
