import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.local.run_folder import (
    Owner,
    Running,
    announce,
    announced,
    held,
    of_port,
    owner,
)
from shared.errors import ConfigError

RUNNING = Running("http://127.0.0.1:1/v1", "nats://127.0.0.1:2", {"gateway": 3}, {"nats": 2})

# Has a folder, announces itself, says so, and waits to be killed or told to leave.
HOLDER = """
import sys
from pathlib import Path
from services.local.run_folder import Running, announce, held

folder = Path(sys.argv[1])
with held(folder):
    (folder / "logs" / "nats.log").write_text("mine")
    announce(folder, Running("", "", {}, {}))
    print("here", flush=True)
    sys.stdin.readline()
"""


def holder(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    return process


def test_a_second_stack_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Two that start at once must not delete each other's logs."""
    with holder(tmp_path) as first:
        with pytest.raises(ConfigError, match=rf"{tmp_path} \(process {first.pid}\).*--port"):
            held(tmp_path).__enter__()

        assert (tmp_path / "logs" / "nats.log").read_text() == "mine"
        assert announced(tmp_path) is not None
        assert owner(tmp_path) == Owner(first.pid, is_alive=True)
        first.communicate("leave\n", timeout=20)

    assert first.returncode == 0
    assert owner(tmp_path) is None
    assert announced(tmp_path) is None


def test_a_killed_owner_is_known_and_its_folder_can_be_had(tmp_path: Path) -> None:
    """Its lock is gone with it; what it announced is not."""
    with holder(tmp_path) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert owner(tmp_path) == Owner(first.pid, is_alive=False)
    assert announced(tmp_path) is not None

    with held(tmp_path):
        assert announced(tmp_path) is None
        assert list((tmp_path / "logs").iterdir()) == []
        assert owner(tmp_path) == Owner(os.getpid(), is_alive=True)


def test_what_is_announced_is_read_back(tmp_path: Path) -> None:
    with held(tmp_path):
        assert announced(tmp_path) is None
        announce(tmp_path, RUNNING)

        assert announced(tmp_path) == RUNNING


def test_a_folder_that_never_was_has_no_owner(tmp_path: Path) -> None:
    """Asking leaves nothing there."""
    assert owner(tmp_path / "run") is None
    assert not (tmp_path / "run").exists()


def test_each_port_has_a_folder_of_its_own() -> None:
    assert of_port(8000) != of_port(8001)
