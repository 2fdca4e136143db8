"""How good the router's placements are: the whole table, its two figures, and how it is shown."""

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks import report
from benchmarks.placement import cells, traces
from benchmarks.placement.cells import Cell, Outcome
from benchmarks.placement.traces import TracesMissing

_VARIABLE = "FARSPAN_TRACES"
_OURS = "farspan"

Table = Mapping[str, Mapping[str, Outcome]]  # cell -> placer -> outcome


def measure() -> dict[str, float]:
    """The figures of the worst cell, with the traces in the folder that FARSPAN_TRACES names."""
    return summary(table(traces_folder()))


def traces_folder() -> Path:
    """Where the environment says the traces are. Raises TracesMissing."""
    folder = os.environ.get(_VARIABLE)
    if not folder:
        raise TracesMissing(f"set {_VARIABLE} to the folder with {traces.SESSIONS_FILE}")
    return Path(folder)


def table(folder: Path) -> Table:
    """Every placer in every cell, a cell a process. Raises TracesMissing."""
    num_cells = len(_cells(folder))
    rows: dict[str, Mapping[str, Outcome]] = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for name, row in pool.map(_row, [folder] * num_cells, range(num_cells)):
            report.progress(f"{name}: {row[_OURS].vs_oracle:.1%}, P90 x {_p90_ratio(row):.2f}")
            rows[name] = row
    return rows


def _cells(folder: Path) -> list[Cell]:
    return cells.all_cells(traces.load_sessions(folder), traces.load_requests(folder))


def _row(folder: Path, number: int) -> tuple[str, dict[str, Outcome]]:
    cell = _cells(folder)[number]
    return cell.name, {name: cells.outcome(cell, make) for name, make in cells.PLACERS.items()}


def summary(rows: Table) -> dict[str, float]:
    """`reuse_vs_oracle` and `p90_ttft_vs_best_baseline` (below 1 is better), in the worst cells."""
    return {
        "reuse_vs_oracle": min(row[_OURS].vs_oracle for row in rows.values()),
        "p90_ttft_vs_best_baseline": max(_p90_ratio(row) for row in rows.values()),
    }


def figures(rows: Table) -> dict[str, float]:
    """The whole table as flat figures, the summary first."""
    flat = summary(rows)
    for cell, row in rows.items():
        for placer, one in row.items():
            name = f"{cell}_{placer}"
            flat[f"{name}_reuse"] = one.reuse
            flat[f"{name}_reuse_vs_oracle"] = one.vs_oracle
            flat[f"{name}_ttft_p50_s"] = one.ttft_p50_s
            flat[f"{name}_ttft_p90_s"] = one.ttft_p90_s
            flat[f"{name}_ttft_p99_s"] = one.ttft_p99_s
            flat[f"{name}_busiest"] = one.busiest
            flat[f"{name}_moved_tokens"] = one.moved_tokens
    return flat


def markdown(rows: Table) -> str:
    """The table for people: reuse and its share of the possible, P90 and P50 of the first token."""
    placers = list(cells.PLACERS)
    lines = [
        "| cell | possible reuse | " + " | ".join(placers) + " |",
        "|---|---|" + "---|" * len(placers),
    ]
    for cell, row in rows.items():
        best_s = min(one.ttft_p90_s for one in row.values())
        entries = [_entry(row[name], best_s) for name in placers]
        lines.append(f"| {cell} | {row[_OURS].oracle_reuse:.3f} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def _entry(one: Outcome, best_s: float) -> str:
    p90 = f"{one.ttft_p90_s:.2f} s"
    p90 = f"**{p90}**" if one.ttft_p90_s == best_s else p90
    return f"{one.reuse:.3f} ({one.vs_oracle:.1%}), {p90}, {one.ttft_p50_s:.2f} s"


def _p90_ratio(row: Mapping[str, Outcome]) -> float:
    best_s = min(one.ttft_p90_s for name, one in row.items() if name != _OURS)
    return row[_OURS].ttft_p90_s / best_s
