import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Starts two processes under a guard, says their ids, and waits to be killed or told to leave.
STARTER = """
import asyncio, pathlib, sys
from services.local.child import guarded, start
from services.local.plan import Spec

async def main(log):
    spec = Spec("t", (sys.executable, "-c", "import time; time.sleep(600)"), {}, 0, has_probe=False)
    with guarded() as guard:
        children = [await start(spec, log) for _ in range(2)]
        for child in children:
            guard.tell(f"+{child.pid}")
        print(*(child.pid for child in children), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for child in children:
            await child.stop(10)
            guard.tell(f"-{child.pid}")

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


def start(log: Path) -> "tuple[subprocess.Popen[str], list[int]]":
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_starter_leaves_no_process(tmp_path: Path) -> None:
    """Nobody can clean up after SIGKILL but somebody else."""
    starter, pids = start(tmp_path / "log")
    with starter:
        assert all(map(is_running, pids))
        os.kill(starter.pid, signal.SIGKILL)

    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def test_an_orderly_end_needs_no_guard(tmp_path: Path) -> None:
    starter, pids = start(tmp_path / "log")
    with starter:
        starter.communicate("leave\n", timeout=20)

    assert starter.returncode == 0
    assert not any(map(is_running, pids))
