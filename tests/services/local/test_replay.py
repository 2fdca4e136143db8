import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from services.local.__main__ import main
from services.router import records
from services.router.records import Inputs
from services.router.view import Hit, Rates, WorkerKey
from shared import farspan_pb2 as pb
from tests.services.router.fleets import decode, load, prefill, request


def stored(request_id: str, model: str = "demo") -> dict[str, Any]:
    placing = request(request_id=request_id)
    placing.model = model
    bare, digest = records.without_hashes(placing)
    fleet = [prefill("p0"), prefill("p1", load=load(waiting_tokens=77)), decode("d0")]
    hits = {WorkerKey("p1", 1): Hit(7, pb.TIER_HOST)}
    seen = Inputs(bare, digest, fleet, hits, Rates(), 0.1 + 0.2)
    record = records.record("router-a", 1000, seen, records.judge(seen))
    return json_format.MessageToDict(record)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


def write(file: Path, *lines: object) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_stored_decisions_are_decided_again(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Placements and refusals, from a router's file and from the gateway's answer."""
    write(
        file, stored("a"), stored("b", model="unknown"), {"decisions": [stored("c"), stored("d")]}
    )

    assert main(["replay-decisions", str(file)]) == 0
    assert capsys.readouterr().out == "4 decisions, all the same\n"


def test_the_first_difference_is_shown_and_fails(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of one score is enough."""
    changed = stored("b")
    changed["outcome"]["scores"][0]["costS"] += 2**-52
    write(file, stored("a"), changed, stored("c"))

    assert main(["replay-decisions", str(file)]) == 1
    told = capsys.readouterr().err
    assert f"{file}:2: request b is decided otherwise now" in told
    assert "scores[0].cost_s: " in told
    assert "stored:   prefill p1" in told and "replayed: prefill p1" in told


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"inputs": 5}',
        '{"decisions": [{"no": 1}]}',
        '{"decisions": [5]}',
        '{"a":' * 100_000,
    ],
    ids=range(6),
)
def test_a_line_that_is_no_decision_is_named(
    file: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, stored("a"))
    with file.open("a") as output:
        output.write(line + "\n")

    assert main(["replay-decisions", str(file)]) == 2
    assert f"{file}:2 is not a decision" in capsys.readouterr().err


def test_figures_that_no_router_has_are_named(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = stored("a")
    broken["inputs"]["rates"]["link_bytes_per_s"] = 0
    write(file, broken)

    assert main(["replay-decisions", str(file)]) == 2
    assert f"{file}:1 is not a decision: its figures cannot be" in capsys.readouterr().err


def test_an_empty_file_proves_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(file)

    assert main(["replay-decisions", str(file)]) == 2
    assert "holds no decision" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay-decisions", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
