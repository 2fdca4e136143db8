"""The gateway's figures: its speed beside LiteLLM's proxy in one run, a turn of a conversation of a
million tokens, and how often its text and its doors were tried. README.md says what each means.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks import invariance, report
from benchmarks.gateway_speed import long_turn, streams

_SPLITS, _SEED = 10_000, 1


def main() -> int:
    """Measure, write benchmarks/results/gateway.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fuzzed", type=Path, help="what `python -m tests.clients.fuzz` wrote, to be told as well"
    )
    given = parser.parse_args()
    figures = streams.measure()
    figures |= long_turn.measure()
    report.progress("random splits of answers")
    figures["invariance_splits"] = invariance.splits(_SPLITS, _SEED)
    if given.fuzzed is not None:
        fuzzed = json.loads(given.fuzzed.read_text())
        figures["schemathesis_cases"] = fuzzed["cases"]
        figures["schemathesis_5xx"] = fuzzed["server_errors"]
    report.write("gateway", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
