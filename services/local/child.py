"""One process of the stack: start, watch, stop, last words.

Each is the leader of its own process group, so what it started ends with it, and a Ctrl-C in the
terminal reaches only the command, which stops the rest in order.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.local.plan import ROOT, Spec, environment

_LAST_LINES = 15
_GUARD_EXIT_S = 10.0
_GROUP_TRIES, _GROUP_TRY_S = 100, 0.01


class Guard:
    """The process that cleans up if this one is killed; see services/local/guard.py."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def tell(self, word: str) -> None:
        """Pass on one word of the guard's language."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a killed guard guards nothing, which harms nothing now
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()


@contextmanager
def guarded() -> Iterator[Guard]:
    """A guard for the processes started inside the block; all have ended when the block does."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("guard.py"))],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    guard = Guard(process)
    try:
        yield guard
        guard.tell("done")
    finally:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(timeout=_GUARD_EXIT_S)


class Child:
    """A running process of the stack."""

    def __init__(self, spec: Spec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.spec = spec
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return its exit status when it has ended."""
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; an ended process gets none."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self, grace_s: float) -> bool:
        """End it and whatever it started: SIGTERM, a while, SIGKILL. True if SIGTERM was enough."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
                return True
        except TimeoutError:
            return False
        finally:
            self._kill_group()
            await self._process.wait()
            # What it had started is another's child: a killed one is seen for an instant longer.
            for _ in range(_GROUP_TRIES):
                if not self._kill_group():
                    break
                await asyncio.sleep(_GROUP_TRY_S)

    def _kill_group(self) -> bool:
        """Whether anybody was left to kill."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def last_lines(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


async def start(spec: Spec, log: Path) -> Child:
    """Run a process with its output appended to `log`."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            env=environment(spec),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Child(spec, process, log)
