"""What the documents point at must exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())

    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_commands_exist(name: str) -> None:
    commands = re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / name).read_text(), flags=re.MULTILINE)

    assert set(commands) <= TARGETS


def test_ci_runs_the_readmes_test_command_and_nothing_else() -> None:
    """CI and laptop cannot differ if they run the same line."""
    commands = [
        line
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]

    assert commands == ["exec make test"]
    assert "\nmake test\n" in (ROOT / "README.md").read_text()


def test_decisions_are_numbered_without_gaps_and_have_a_status() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))

    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    assert all("Status: " in path.read_text() for path in records)


def test_the_readmes_numbers_are_the_measured_ones() -> None:
    """A figure in prose goes stale; these are read from the committed result."""
    figures = json.loads((ROOT / "benchmarks/results/cpu_engine.json").read_text())["figures"]
    rows = [
        ("prefill_4k_s", "prefill_4k_transformers_s", "prefill_4k_speedup"),
        (
            "decode_1_tokens_per_s",
            "decode_1_transformers_tokens_per_s",
            "decode_1_speedup",
        ),
        ("decode_8_tokens_per_s",),
    ]
    readme = (ROOT / "README.md").read_text()

    for row in rows:
        wanted = [f"{figures[key]:.1f}" for key in row]
        assert any(all(number in line for number in wanted) for line in readme.splitlines()), row
    assert f"{figures['added_ttft_p50_ms']:.1f} ms" in readme
