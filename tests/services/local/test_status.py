from pathlib import Path

import pytest

from services.local import run_folder
from services.local.status import WORKER_COLUMNS, status, table, worker_rows
from shared import farspan_pb2 as pb
from shared.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stack of every port keeps its files."""
    monkeypatch.setattr(run_folder, "of_port", lambda port: tmp_path)
    return tmp_path


def test_without_a_stack_there_is_no_status(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no stack runs with its gateway at port 8000: start"):
        status(8000)


def test_a_killed_stack_is_told_from_one_that_runs(folder: Path) -> None:
    """What it announced is still there, and nobody would answer."""
    (folder / run_folder.LOCK_FILE).write_text("1")
    run_folder.announce(folder, run_folder.Running("", "", {}, {}))

    with pytest.raises(ConfigError, match="port 8000: the last one was killed"):
        status(8000)


def test_a_stack_that_starts_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its owner lives, and has announced nothing yet."""
    with run_folder.held(folder):
        assert status(8000) == 1

    assert "at port 8000 is starting" in capsys.readouterr().out


def test_a_worker_is_one_readable_row() -> None:
    beat = pb.Heartbeat(
        worker=pb.WorkerRef(worker_id="decode-0", epoch=1_700_000_000_000_000_000),
        role=pb.ROLE_DECODE,
        state=pb.SERVICE_STATE_READY,
        layout=pb.KvLayout(kv_format="fp32", dcp_size=1, interleave=64),
        load=pb.Load(num_running=3, free_blocks=7, total_blocks=9, hot_hits=3, hot_misses=1),
    )

    heading, row = table(WORKER_COLUMNS, worker_rows([beat])).splitlines()

    cells = " ".join(row.split())
    assert cells == "decode-0 ready 2023-11-14 22:13:20 fp32 W=1 I=64 3 0 0 7/9 75%"
    assert heading.index("free blocks") == row.index("7/9")


def test_a_column_without_content_is_left_out() -> None:
    """Prefill workers have no hot rows; a fleet of them needs no column for it."""
    assert table(("a", "b", "c"), [("1", "", "3"), ("4", "", "")]) == "a  c\n1  3\n4"
