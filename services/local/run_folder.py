"""A stack's own folder: who has it, its logs and traces, and what `farspan status` reads.

One stack at a time has a folder, by a lock that the system takes back even from a killed process.
Knows nothing of processes or services.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from services.local.plan import ROOT, TRACE_FILE
from shared.errors import ConfigError

STACK_FILE = "stack.json"
LOCK_FILE = "lock"
_NUM_TRIES = 5
_TRY_S = 0.05


@dataclass(frozen=True)
class Running:
    """Where a running stack can be asked."""

    base_url: str
    nats_url: str
    probes: Mapping[str, int]
    servers: Mapping[str, int]


@dataclass(frozen=True)
class Owner:
    """The last process that had a folder and did not give it back; it may still run."""

    pid: int
    is_alive: bool


def of_port(port: int) -> Path:
    """Where the stack with its gateway at `port` keeps its files, unless told otherwise."""
    return ROOT / ".run" / str(port)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have the folder inside the block, with fresh logs and traces.

    What an earlier stack left tells nothing about this one. Raises ConfigError, and changes
    nothing, while another stack has the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+") as lock:
        if not _take(lock):
            raise ConfigError(
                f"another stack has {folder} (process {_pid(lock)}): stop it, or choose another"
                " port with --port"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        shutil.rmtree(folder / "logs", ignore_errors=True)
        (folder / "logs").mkdir()
        (folder / TRACE_FILE).unlink(missing_ok=True)
        withdraw(folder)
        try:
            yield
        finally:
            withdraw(folder)
            lock.truncate(0)


def owner(folder: Path) -> Owner | None:
    """Who has the folder, or had it when it was killed; None after an orderly end."""
    with suppress(FileNotFoundError), (folder / LOCK_FILE).open() as lock:
        pid = _pid(lock)
        if pid is not None:
            return Owner(pid, is_alive=not _is_free(lock))
    return None


def announce(folder: Path, running: Running) -> None:
    """Leave word for `farspan status`; whoever reads it gets all of it."""
    draft = folder / f"{STACK_FILE}.new"
    draft.write_text(json.dumps(asdict(running)))
    draft.replace(folder / STACK_FILE)


def withdraw(folder: Path) -> None:
    """Take back what was announced."""
    (folder / STACK_FILE).unlink(missing_ok=True)


def announced(folder: Path) -> Running | None:
    """Where the folder's stack can be asked; None before it is ready, and while it stops."""
    with suppress(FileNotFoundError):
        return Running(**json.loads((folder / STACK_FILE).read_text()))
    return None


def _take(lock: TextIO) -> bool:
    for _ in range(_NUM_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_TRY_S)  # `farspan status` has it for an instant
    return False


def _is_free(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid(lock: TextIO) -> int | None:
    lock.seek(0)
    content = lock.read()
    return int(content) if content else None
