from pathlib import Path

import pytest

from benchmarks.placement import quality
from benchmarks.placement.cells import PLACERS, Outcome
from benchmarks.placement.traces import TracesMissing


def outcome(reuse: float, p90_s: float) -> Outcome:
    return Outcome(reuse, 0.8, 0.1, p90_s, 9.0, 1.5, 1000.0)


def row(ours: Outcome, other: Outcome) -> dict[str, Outcome]:
    return {name: ours if name == "farspan" else other for name in PLACERS}


ROWS = {
    "easy": row(outcome(0.8, 1.0), outcome(0.5, 2.0)),
    "hard": row(outcome(0.6, 3.0), outcome(0.4, 2.5)),
}


def test_the_figures_are_those_of_the_worst_cell() -> None:
    """A mean would hide a workload on which somebody else is better."""
    assert quality.summary(ROWS) == {
        "reuse_vs_oracle": pytest.approx(0.75),
        "p90_ttft_vs_best_baseline": pytest.approx(1.2),
    }


def test_the_table_has_a_line_for_each_cell_and_marks_the_best_p90() -> None:
    """For people; the same numbers stand in the JSON."""
    lines = quality.markdown(ROWS).splitlines()

    assert len(lines) == 4
    assert "| easy | 0.800 | 0.800 (100.0%), **1.00 s**, 0.10 s |" in lines[2]
    assert "**3.00 s**" not in lines[3]
    assert quality.figures(ROWS)["hard_farspan_ttft_p90_s"] == 3.0


def test_traces_that_are_nowhere_named_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is each machine's own."""
    monkeypatch.delenv("FARSPAN_TRACES", raising=False)
    with pytest.raises(TracesMissing, match="set FARSPAN_TRACES"):
        quality.measure()
    monkeypatch.setenv("FARSPAN_TRACES", "/nowhere")
    assert quality.traces_folder() == Path("/nowhere")
