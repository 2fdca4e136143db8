"""Schemathesis on the gateway's own OpenAPI document.

`python -m tests.clients.fuzz` starts a stack, or takes a running one with --url, and writes JSON:
cases, server errors, and how often each operation gave each status.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from services.local.plan import Options
from services.local.stack import Stack
from tests.clients import programs
from tests.clients.programs import KEY, MODEL, Desk

EXAMPLES = 200  # of each operation; what the document says gives each some hundreds more
LIMIT_S = 3000
SEED = 1


@dataclass(frozen=True)
class Fuzzed:
    """What came of a run."""

    cases: int
    server_errors: int
    statuses: dict[str, int]  # "POST /v1/completions 400" -> how often
    output: str


def fuzz(root_url: str, folder: Path, examples: int = EXAMPLES) -> Fuzzed:
    """Send generated cases to every operation. Raises AssertionError if it cannot."""
    desk = Desk(folder)
    counts = desk.work / "statuses.json"
    command: list[str | Path] = [programs.program_of("schemathesis", "schemathesis"), "run"]
    command += [f"{root_url}/openapi.json", "--url", root_url]
    command += ["--header", f"Authorization: Bearer {KEY}", "--workers", "8"]
    command += ["--checks", "not_a_server_error", "--continue-on-failure", "--no-shrink"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(examples)]
    command += ["--seed", str(SEED), "--request-timeout", "150", "--no-color"]
    command += ["--suppress-health-check", "all"]
    environ = {
        "SCHEMATHESIS_HOOKS": "fuzz_hooks",
        "PYTHONPATH": str(Path(__file__).parent),
        "FUZZ_STATUSES": str(counts),
        "FUZZ_MODEL": MODEL,
    }
    finished = desk.run(command, LIMIT_S, environ)
    assert counts.exists(), finished.out + finished.err
    statuses: dict[str, int] = json.loads(counts.read_text())
    told = Counter[int]()
    for label, number in statuses.items():
        told[int(label.rsplit(" ", 1)[1])] += number
    errors = sum(number for status, number in told.items() if status >= 500)
    return Fuzzed(told.total(), errors, statuses, finished.out)


def short_stack(folder: Path) -> Stack:
    """A stack for who has the key; answers to cases that say nothing of length are short."""
    settings = {
        "GATEWAY_API_KEYS_FILE": str(programs.keys_file(folder)),
        "GATEWAY_DEFAULT_MAX_TOKENS": "4",
        "GATEWAY_DEADLINE_S": "120",
    }
    return Stack(Options(port=0, run_folder=folder / "stack", settings=settings))


async def _of_own_stack(folder: Path, examples: int) -> Fuzzed:
    async with short_stack(folder) as stack:
        root_url = stack.base_url.removesuffix("/v1")
        return await asyncio.to_thread(fuzz, root_url, folder, examples)


def main() -> int:
    """Write the counts as JSON; 0 if there was no server error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--url", help="the root of a running service, instead of a stack of its own"
    )
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="of each operation")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.url:
            fuzzed = fuzz(given.url, folder, given.examples)
        else:
            fuzzed = asyncio.run(_of_own_stack(folder, given.examples))
    told = asdict(fuzzed)
    output = told.pop("output")
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    if fuzzed.server_errors:
        sys.stderr.write(output)
    return 1 if fuzzed.server_errors else 0


if __name__ == "__main__":
    sys.exit(main())
