"""Replay the traces under every placer: python -m benchmarks.placement --traces FOLDER."""

import argparse
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.placement import quality
from benchmarks.placement.traces import TracesMissing

_PAGE = report.ROOT / "docs" / "placement.md"
_BEGIN, _END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def main() -> None:
    """Write benchmarks/results/placement.json, and the table into docs/placement.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of the traces, else $FARSPAN_TRACES")
    options = parser.parse_args()
    try:
        rows = quality.table(options.traces or quality.traces_folder())
    except TracesMissing as error:
        sys.exit(str(error))
    # The folder is this machine's own; the result names none.
    sys.argv[1:] = ["--traces", "FOLDER"]
    report.write("placement", quality.figures(rows))
    before, rest = _PAGE.read_text().split(_BEGIN)
    _PAGE.write_text(before + _BEGIN + quality.markdown(rows) + _END + rest.split(_END)[1])


if __name__ == "__main__":
    main()
