"""The command line as a person uses it: `farspan serve`, `chat` and `status`, with real workers."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.local.run_folder import of_port
from services.local.servers import free_port
from tests import demo

START_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
SERVICES = ("gateway", "router", "kv_index", "prefill-0", "decode-0")
PROMPT = [100 + 37 * i % 3900 for i in range(1000)]  # tokens that the demo model goes on from


def farspan(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "services.local", *arguments],
        cwd=demo.CHECKPOINT.parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        **options,  # type: ignore[call-overload]
    )


class Served:
    """A running `farspan serve`; its processes are known by their temporary folder or log."""

    def __init__(self, port: int, temporary: Path) -> None:
        self.port = port
        self.temporary = temporary
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.local", "serve", "--port", str(port)],
            cwd=demo.CHECKPOINT.parents[1],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_welcome(self) -> None:
        """Read what is shown until there is nothing more to wait for."""
        self.until_shown("Logs:")
        assert self.process.stdout is not None
        for _ in range(len(SERVICES) + 2):
            self.shown += self.process.stdout.readline()

    def until_shown(self, part: str) -> None:
        """Read until a line holds this part."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + START_S
        line = ""
        while part not in line:
            line = self.process.stdout.readline()
            if not line:
                raise AssertionError(self.shown + self.process.communicate(timeout=START_S)[1])
            assert time.monotonic() < deadline_s, self.shown
            self.shown += line

    def kill(self, name: str) -> None:
        """One of the stack's own processes, without a goodbye; its log is its output."""
        log = str(of_port(self.port) / "logs" / f"{name}.log")
        (pid,) = (
            pid
            for pid in self.processes()
            if os.readlink(f"/proc/{pid}/fd/1") == log and os.getpgid(pid) == pid
        )
        os.kill(pid, signal.SIGKILL)

    def processes(self) -> dict[int, str]:
        """Everything that descends from the command and runs, with its command line.

        Redis writes its name over its environment, and is known by its log.
        """
        logs, found = str(of_port(self.port) / "logs"), {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environ = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
                output = os.readlink(folder / "fd" / "1")
            except OSError:  # ended meanwhile, or another user's
                continue
            if f"TMPDIR={self.temporary}".encode() in environ or output.startswith(logs):
                found[int(folder.name)] = command.replace(b"\0", b" ").decode()
        return found

    def until_gone(self) -> None:
        deadline_s = time.monotonic() + 20
        while left := self.processes():
            assert time.monotonic() < deadline_s, f"left over: {left}"
            time.sleep(0.05)


@contextmanager
def serving(temporary: Path) -> Iterator[Served]:
    """A stack that was started on the command line and has said that it serves."""
    with starting(temporary) as served:
        served.until_welcome()
        yield served


@contextmanager
def starting(temporary: Path) -> Iterator[Served]:
    """A stack that was started on the command line; whatever comes of it is gone afterwards."""
    served = Served(free_port(), temporary)
    try:
        with served.process:
            try:
                yield served
            finally:
                served.process.kill()
    finally:
        served.until_gone()
        shutil.rmtree(of_port(served.port), ignore_errors=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for the tests that leave it running."""
    with serving(tmp_path_factory.mktemp("serve")) as running:
        yield running


def left_behind(served: Served, before: set[str]) -> list[str]:
    """Sockets, temporary files and shared memory of a stack that has ended."""
    files = [str(path) for path in served.temporary.rglob("*")]
    sockets = [str(path) for path in of_port(served.port).rglob("*") if path.is_socket()]
    return [*files, *sockets, *(set(os.listdir(SHARED_MEMORY)) - before)]


def test_what_is_shown_can_be_used_as_it_is(served: Served) -> None:
    """The URL, a curl that answers sensibly, and every log."""
    assert f"Serving demo-fp8 at http://127.0.0.1:{served.port}/v1" in served.shown
    (curl,) = re.findall(r"^  (curl .*\n.*)$", served.shown, re.MULTILINE)
    logs = dict(re.findall(r"^  (\S+) +(/\S+\.log)$", served.shown, re.MULTILINE))

    answer = subprocess.run(
        ["sh", "-c", curl], capture_output=True, text=True, timeout=60, check=True
    ).stdout

    assert '"content":"river (noun): ' in answer
    assert '"finish_reason":"stop"' in answer
    assert set(logs) == {"nats", "redis", *SERVICES}
    assert all(Path(path).is_file() for path in logs.values())
    (status,) = re.findall(r"^  (.* status.*?)  ", served.shown, re.MULTILINE)
    told = subprocess.run(["sh", "-c", status], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and "prefill" in told.stdout, told


def test_a_chat_over_a_pipe_is_answered(served: Served) -> None:
    done = farspan("chat", "--port", str(served.port), input="What does river mean?\n")

    assert done.stdout.startswith("river (noun): ")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_status_shows_services_workers_and_pools(served: Served) -> None:
    done = farspan("status", "--port", str(served.port))

    assert done.returncode == 0
    services, workers = done.stdout.split("\n\n")[1:3]
    ready = [line.split()[0] for line in services.splitlines() if " ready " in line]
    assert sorted(ready) == sorted(SERVICES)
    assert "nats" in services and "redis" in services
    header, *rows = workers.strip().splitlines()
    assert "free blocks" in header
    assert [row.split()[:2] for row in rows] == [["decode-0", "ready"], ["prefill-0", "ready"]]


def test_a_taken_port_is_told_in_one_line(served: Served) -> None:
    done = farspan("serve", "--port", str(served.port))

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"port {served.port}" in line and "--port" in line


def test_a_wrong_checkpoint_is_told_in_one_line() -> None:
    """Before anything is said to start."""
    done = farspan("serve", "--port", str(free_port()), "--checkpoint", "/nowhere/model")

    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "/nowhere/model does not exist" in line and "--checkpoint" in line


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """No process, no socket file, no temporary file, no shared memory; and it says so."""
    before = set(os.listdir(SHARED_MEMORY))
    with serving(tmp_path) as served:
        assert len(served.processes()) >= 2 + len(SERVICES)
        served.process.send_signal(signal.SIGINT)
        shown, errors = served.process.communicate(timeout=60)

        assert (served.process.returncode, errors) == (0, "")
        assert shown.endswith("Stopped: no process is left.\n")
        assert served.processes() == {}
        assert left_behind(served, before) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port), timeout=1)


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    """Not even the ranks, which are children of children."""
    with serving(tmp_path) as served:
        assert any("spawn_main" in command for command in served.processes().values())
        served.process.kill()
        served.process.wait()

        served.until_gone()


def test_a_death_during_the_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    """What cannot start would not fare better the next time; nothing is left of the stack."""
    with starting(tmp_path) as served:
        served.until_shown("] router     ready")
        served.kill("router")
        _, errors = served.process.communicate(timeout=60)

        assert served.process.returncode == 1
        assert errors.startswith("farspan: router ended with status -9; the end of ")
        assert served.processes() == {}


def test_the_status_says_that_a_stack_is_starting(tmp_path: Path) -> None:
    with starting(tmp_path) as served:
        served.until_shown("Farspan is starting")
        done = farspan("status", "--port", str(served.port))
        assert (done.returncode, done.stderr) == (1, "")
        assert f"port {served.port} is starting" in done.stdout

        served.process.kill()
        served.process.wait()
        done = farspan("status", "--port", str(served.port))
        assert done.returncode == 2
        assert "the last one was killed" in done.stderr


def complete(served: Served, retry_s: float = 0.0) -> str | None:
    """A greedy answer that takes a few seconds; None if there is none, for as long as retried."""
    body = {"model": "demo-fp8", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}
    deadline_s = time.monotonic() + retry_s
    while True:
        try:
            answer = httpx.post(
                f"http://127.0.0.1:{served.port}/v1/completions",
                json=body,
                timeout=60,
                trust_env=False,
            )
            if answer.is_success:
                return str(answer.json()["choices"][0]["text"])
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.2)


def test_what_is_killed_starts_again_and_answers_as_before(tmp_path: Path) -> None:
    """One after another, each with a request under way; and a stop in the middle leaves nothing.

    That request is answered, too, if it was not the gateway that died.
    """
    before = set(os.listdir(SHARED_MEMORY))
    with serving(tmp_path) as served, ThreadPoolExecutor(1) as client:
        wanted = complete(served)
        assert wanted
        for name in ("nats", "redis", *SERVICES):
            under_way = client.submit(complete, served)
            time.sleep(0.3)
            served.kill(name)
            served.until_shown(f"] {name:<10} ended with status -9, starts again")
            served.until_shown(f"] {name:<10} ready")

            assert under_way.result() == (None if name == "gateway" else wanted), name
            assert complete(served, retry_s=10) == wanted, name

        served.kill("decode-0")
        served.until_shown("] decode-0   ended")
        time.sleep(1)  # amid its start
        served.process.send_signal(signal.SIGINT)
        shown, errors = served.process.communicate(timeout=60)

        assert (served.process.returncode, errors) == (0, "")
        assert shown.endswith("Stopped: no process is left.\n")
        assert served.processes() == {}
        assert left_behind(served, before) == []
