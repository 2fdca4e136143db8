"""A service's process: start, stop on a signal, exit code; and its health probe.

The probe has its own thread and port, so a busy event loop is still seen as alive and a stuck one
is seen as stuck.
"""

import asyncio
import gc
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shared.errors import ConfigError

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2
_TICK_S = 1.0
_STALLED_S = 30.0  # far above any pause a healthy loop makes; compute runs in threads


class Stopping:
    """Set once the process was asked to stop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Ask for the stop; asking twice is harmless."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether the stop was asked for."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when the stop is asked for."""
        await self._event.wait()


def run(service: str, main: Callable[[Stopping], Awaitable[None]]) -> int:
    """Run `main` to its end and return the process's exit code.

    SIGTERM and SIGINT set the Stopping that `main` gets; a second one cancels it. A ConfigError is
    told in one line on stderr.
    """
    try:
        asyncio.run(_supervise(main))
    except asyncio.CancelledError:
        return EXIT_FAILED
    except BaseException as error:
        config_error = _config_error(error)
        if config_error is None:
            raise
        sys.stderr.write(f"{service}: {config_error}\n")
        return EXIT_CONFIG
    return 0


async def _supervise(main: Callable[[Stopping], Awaitable[None]]) -> None:
    stopping = Stopping()
    task = asyncio.ensure_future(main(stopping))

    def on_signal() -> None:
        if stopping.is_set():
            task.cancel()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await task


def freeze_startup() -> None:
    """Take all that lives now out of garbage collection; call it when the service is ready.

    Modules and settings stay for the process's life, and walking them stops the loop for 0.1 s.
    """
    gc.collect()
    gc.freeze()


def _config_error(error: BaseException) -> ConfigError | None:
    """The ConfigError behind `error`, also when a task group wrapped it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, ConfigError) else None


@asynccontextmanager
async def health(
    host: str,
    port: int,
    state: Callable[[], tuple[bool, str]],
    metrics: Callable[[], Mapping[str, float]] | None = None,
) -> AsyncIterator[int]:
    """Serve /livez and /readyz inside the block; yields the port, which 0 leaves to the system.

    `state` says whether the service is ready and why (not); `metrics`, if given, what /metrics
    tells Prometheus. Both are called on the probe's thread. /livez is 200 unless the event loop has
    stood still for 30 s.
    """
    pulse = _Pulse()
    try:
        server = _ProbeServer((host, port), _Probe)
    except OSError as error:
        raise ConfigError(f"cannot serve the health probe on {host}:{port}: {error}") from error
    server.state, server.pulse, server.metrics = state, pulse, metrics
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="health", daemon=True
    )
    thread.start()
    beating = asyncio.create_task(pulse.beat())
    try:
        yield server.server_address[1]
    finally:
        beating.cancel()
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


class _Pulse:
    """When the event loop last ran; written by the loop, read by the probe's thread."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()

    async def beat(self) -> None:
        while True:
            self._at_s = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def age_s(self) -> float:
        return time.monotonic() - self._at_s


class _ProbeServer(ThreadingHTTPServer):
    daemon_threads = True
    state: Callable[[], tuple[bool, str]]
    pulse: _Pulse
    metrics: Callable[[], Mapping[str, float]] | None


class _Probe(BaseHTTPRequestHandler):
    server: _ProbeServer

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.server.metrics is not None:
            self._send(200, "text/plain; version=0.0.4", _exposition(self.server.metrics()))
            return
        answers = {"/livez": self._livez, "/readyz": self.server.state}
        if self.path not in answers:
            self.send_error(404)
            return
        is_well, reason = answers[self.path]()
        body = json.dumps({"ok": is_well, "reason": reason})
        self._send(200 if is_well else 503, "application/json", body)

    def _send(self, status: int, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # the name http.server wants

    def _livez(self) -> tuple[bool, str]:
        age_s = self.server.pulse.age_s()
        if age_s > _STALLED_S:
            return False, f"the event loop has stood still for {age_s:.0f} s"
        return True, "alive"

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds and say nothing worth a line."""


def _exposition(metrics: Mapping[str, float]) -> str:
    """Prometheus's text format; by its custom, a name that ends in _total only grows."""
    lines = []
    for name, value in metrics.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# TYPE {name} {kind}\n{name} {float(value):.17g}\n")
    return "".join(lines)
