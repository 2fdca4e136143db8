"""A server of one test's own, which it may kill and start again, empty, on the same port."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.local.servers import free_port, nats_command

_START_S = 10.0


class LocalServer:
    """A NATS or Redis process on a port of its own."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self.address = f"127.0.0.1:{port}"
        self._command = command
        self._port = port
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it accepts connections."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline_s, self._log.read_text()
                time.sleep(0.01)

    def pause(self) -> None:
        """Stand still: connections are accepted, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a goodbye; ending it twice is harmless."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def own_nats(folder: Path) -> Iterator[LocalServer]:
    """A NATS server inside the block, for a test that stops it."""
    port = free_port()
    server = LocalServer(nats_command(port), port, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
