import json
import re
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks import report

FIELDS = {"name", "commit", "date", "machine", "command", "figures"}


def test_a_result_says_what_was_measured_where_and_on_which_code(tmp_path: Path) -> None:
    """A figure without its commit and machine cannot be compared with another."""
    path = report.write("sample", {"prefill_4k_s": 1.23456, "streams": 8}, tmp_path)

    result = json.loads(path.read_text())
    assert path.name == "sample.json"
    assert result.keys() == FIELDS
    assert result["figures"] == {"prefill_4k_s": 1.235, "streams": 8}
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", result["commit"])
    assert datetime.fromisoformat(result["date"]).tzinfo is not None
    assert "cores" in result["machine"]
    assert result["command"].startswith("python -m benchmarks.sample")


@pytest.mark.parametrize("path", sorted(report.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_keep_the_convention(path: Path) -> None:
    """Documents copy figures from these files by name."""
    result = json.loads(path.read_text())

    assert result.keys() == FIELDS
    assert result["name"] == path.stem
    assert all(isinstance(value, int | float) for value in result["figures"].values())
