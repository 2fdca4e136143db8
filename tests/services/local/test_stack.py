import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.local import restarts, stack
from services.local.plan import Options, Spec
from services.local.probe import require_free
from services.local.run_folder import STACK_FILE
from services.local.servers import free_port
from services.local.stack import Stack, StackFailed
from shared.errors import ConfigError

# Without workers the gateway never becomes ready: the stack stays in the middle of its start.
SERVE = """
import sys
from pathlib import Path
from services.local.plan import Options
from services.local.serve import serve
from shared.lifecycle import run

options = Options(port=0, prefill_workers=0, decode_workers=0, run_folder=Path(sys.argv[1]))
sys.exit(run("farspan", lambda stopping: serve(options, stopping)))
"""


def processes_of(folder: Path) -> list[int]:
    """Running processes that write into the folder: its logs are their output."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if os.readlink(link).startswith(str(folder / "logs")):
                found.append(int(link.parts[2]))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def until_running(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(processes_of(folder)) < count:
        assert time.monotonic() < deadline, "the stack did not start"
        time.sleep(0.02)


def until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while processes_of(folder):
        assert time.monotonic() < deadline, f"left over: {processes_of(folder)}"
        time.sleep(0.02)


def serve(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder)], stdout=subprocess.PIPE, text=True
    )


async def test_a_service_that_cannot_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    """The person sees what to change, without looking for the log."""
    options = Options(
        port=0,
        prefill_workers=0,
        decode_workers=0,
        run_folder=tmp_path / "run",
        settings={"ROUTER_NONSENSE": "1"},
    )

    with pytest.raises(StackFailed, match=r"(?s)router ended with status 2.*ROUTER_NONSENSE"):
        async with Stack(options):
            pass

    assert processes_of(tmp_path / "run") == []
    assert not (tmp_path / "run" / STACK_FILE).exists()


async def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    port = free_port()
    holder = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()

        with pytest.raises(ConfigError, match=f"port {port}"):
            async with Stack(Options(port=port, run_folder=tmp_path / "run")):
                pass
        holder.terminate()

    assert not (tmp_path / "run").exists()


async def test_a_wrong_checkpoint_is_told_before_anything_starts(tmp_path: Path) -> None:
    options = Options(port=0, checkpoint=tmp_path / "nothing", run_folder=tmp_path / "run")

    with pytest.raises(ConfigError, match="checkpoint"):
        async with Stack(options):
            pass

    assert not (tmp_path / "run").exists()


async def test_a_second_stack_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """Two that start at once would delete each other's logs; the first does not notice."""
    folder = tmp_path / "run"
    with serve(folder) as process:
        until_running(folder, 5)

        with pytest.raises(ConfigError, match=rf"another stack has {folder}"):
            async with Stack(Options(port=0, run_folder=folder)):
                pass

        assert len(list((folder / "logs").iterdir())) == len(processes_of(folder)) == 5
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_the_start_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C is pressed when something takes too long: during the start."""
    with serve(tmp_path / "run") as process:
        until_running(tmp_path / "run", 5)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)

    assert process.returncode == 0
    assert output.endswith("Stopped: no process is left.\n")
    assert processes_of(tmp_path / "run") == []


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    """The guard outlives the command by as long as it takes."""
    with serve(tmp_path / "run") as process:
        until_running(tmp_path / "run", 5)
        process.kill()

    until_gone(tmp_path / "run")


def test_a_service_that_dies_during_the_start_ends_it(tmp_path: Path) -> None:
    """What cannot start now would not start the next time either."""
    with serve(tmp_path / "run") as process:
        until_running(tmp_path / "run", 5)
        router_log = str(tmp_path / "run" / "logs" / "router.log")
        (router,) = (
            pid
            for pid in processes_of(tmp_path / "run")
            if os.readlink(f"/proc/{pid}/fd/1") == router_log
        )
        os.kill(router, signal.SIGKILL)
        process.wait(timeout=30)

    assert process.returncode == 1
    assert processes_of(tmp_path / "run") == []


# Accepts connections, until there is a file that tells it not to start; has a child of its own.
SERVICE = """
import socket, subprocess, sys, time
from pathlib import Path
port, marker = sys.argv[1:]
if Path(marker).exists():
    sys.exit("no more")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with socket.create_server(("127.0.0.1", int(port))) as listener:
    print("serving", flush=True)
    while True:
        listener.accept()[0].close()
"""


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stacks are of two small services, and what they report is here."""

    def plan(options: Options, folder: Path, ports: Iterator[int]) -> list[Spec]:
        def spec(name: str) -> Spec:
            port = next(ports)
            command = (sys.executable, "-c", SERVICE, str(port), str(tmp_path / f"no {name}"))
            return Spec(name, command, {}, port, has_probe=False)

        return [spec("nats"), spec("other")]

    monkeypatch.setattr(stack, "plan", plan)
    return []


@asynccontextmanager
async def kept(folder: Path, lines: list[str]) -> AsyncIterator[tuple[Stack, asyncio.Task[None]]]:
    """A stack, and the task that keeps it running."""
    options = Options(port=0, run_folder=folder)
    async with Stack(options, lines.append) as running:
        keeping = asyncio.create_task(running.keep())
        try:
            yield running, keeping
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def until(lines: list[str], part: str, count: int = 1) -> str:
    """The line with this part, when there are so many of them."""
    async with asyncio.timeout(20):
        while sum(part in line for line in lines) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return [line for line in lines if part in line][-1]


async def test_a_process_that_ends_by_itself_is_started_again(
    tmp_path: Path, lines: list[str]
) -> None:
    """At the same address and with the same log, which the person is told of."""
    async with kept(tmp_path / "run", lines) as (running, keeping):
        before = running.children["nats"].pid
        os.kill(before, signal.SIGKILL)
        told = await until(lines, "ended with status -9")
        await until(lines, "nats       ready", 2)

        assert str(running.log("nats")) in told
        assert running.children["nats"].pid != before
        assert running.log("nats").read_text() == "serving\nserving\n"
        assert not keeping.done()
        assert not any("other      ended" in line for line in lines)
    assert processes_of(tmp_path / "run") == []


async def test_a_process_that_cannot_start_again_ends_the_stack(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long each try takes: only the time it was ready counts for it."""
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_S", 0.001)
    async with kept(tmp_path / "run", lines) as (running, keeping):
        (tmp_path / "no other").touch()
        os.kill(running.children["other"].pid, signal.SIGKILL)

        with pytest.raises(
            StackFailed, match=r"(?s)other ended 5 times.* status 1; the end of.*no more"
        ):
            async with asyncio.timeout(20):
                await asyncio.shield(keeping)
    assert processes_of(tmp_path / "run") == []


async def test_a_stop_amid_a_restart_leaves_no_process(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it pauses, and what the dead process had started is gone by then."""
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_S", 600.0)
    async with kept(tmp_path / "run", lines) as (running, _):
        os.kill(running.children["nats"].pid, signal.SIGKILL)
        await until(lines, "starts again in 600 s")

        logs = {os.readlink(f"/proc/{pid}/fd/1") for pid in processes_of(tmp_path / "run")}
        assert logs == {str(running.log("other"))}
    assert processes_of(tmp_path / "run") == []


async def test_a_stop_amid_a_start_leaves_no_process(tmp_path: Path, lines: list[str]) -> None:
    """The new process runs, and is not ready yet."""
    async with kept(tmp_path / "run", lines) as (running, _):
        before = running.children["nats"].pid
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(20):
            while running.children["nats"].pid == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert processes_of(tmp_path / "run") == []


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_does_not_exist_is_refused_by_its_number(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port} does not exist"):
        require_free("127.0.0.1", port)
