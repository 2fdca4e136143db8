import asyncio
import os
import signal
import sys
from pathlib import Path

from services.local.child import start
from services.local.plan import Spec

# Starts a process of its own and says its id; "deaf" ignores the request to stop.
PARENT = """
import signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def spec(code: str, *arguments: str) -> Spec:
    return Spec("test", (sys.executable, "-c", code, *arguments), {}, 0, has_probe=False)


async def first_line(log: Path) -> str:
    async with asyncio.timeout(10):
        while not log.read_text().endswith("\n"):  # noqa: ASYNC110  # a file has no event
            await asyncio.sleep(0.01)
    return log.read_text().strip()


async def is_gone(pid: int) -> bool:
    """A killed grandchild is reaped by init a moment later."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_stopped_process_leaves_nothing_that_it_started(tmp_path: Path) -> None:
    """Ranks of a prefill worker are its children, not ours."""
    log = tmp_path / "log"
    child = await start(spec(PARENT), log)
    grandchild = int(await first_line(log))

    assert await child.stop(grace_s=10)
    assert child.returncode == -signal.SIGTERM
    assert await is_gone(grandchild)


async def test_a_deaf_process_is_killed_after_the_grace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await start(spec(PARENT, "deaf"), log)
    grandchild = int(await first_line(log))

    assert not await child.stop(grace_s=0.1)
    assert child.returncode == -signal.SIGKILL
    assert await is_gone(grandchild)


async def test_an_ended_process_can_be_stopped_and_keeps_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = await start(spec("import sys; print('line\\n' * 30 + 'no NATS'); sys.exit(2)"), log)
    assert await child.wait() == 2

    await child.stop(grace_s=1)

    assert child.last_lines().endswith("line\nno NATS")
    assert len(child.last_lines().splitlines()) == 15
