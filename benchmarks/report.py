"""How every benchmark tells its result: benchmarks/results/NAME.json, and the figures on stdout."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def write(name: str, figures: Mapping[str, float], folder: Path = RESULTS) -> Path:
    """Write the result file and return where it is. A key says its unit, unless it is a ratio."""
    result = {
        "name": name,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "figures": {key: _rounded(value) for key, value in figures.items()},
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    for key, value in result["figures"].items():
        print(f"{key:<36} {value:g}")
    print(f"written to {path}", flush=True)
    return path


def progress(text: str) -> None:
    """Say what is being measured; a benchmark is silent for minutes otherwise."""
    print(text, file=sys.stderr, flush=True)


def _rounded(value: float) -> float:
    """Four significant digits: more are noise."""
    return float(f"{value:.4g}")


def _commit() -> str:
    """The commit measured; "+changes" when the code differs from it.

    A copy without git, as on a borrowed GPU machine, is told it by $FARSPAN_COMMIT.
    """
    if told := os.environ.get("FARSPAN_COMMIT"):
        return told
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{commit}+changes" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return (
        f"{', '.join([*gpus, _cpu_model()])}, {len(os.sched_getaffinity(0))} cores,"
        f" {memory_gib:.0f} GiB;"
        f" {platform.system()} {platform.machine()}, Python {platform.python_version()},"
        f" torch {metadata.version('torch')}, transformers {metadata.version('transformers')}"
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
