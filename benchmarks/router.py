"""The index's and the router's figures in one run: speed in process and served, and how well
requests are placed. Needs the `bench` packages and $FARSPAN_TRACES; README.md says what each means.
"""

import sys

from benchmarks import index_speed, placement_speed, report
from benchmarks.placement import quality
from benchmarks.placement.traces import TracesMissing


def main() -> int:
    """Measure, write benchmarks/results/router.json."""
    try:
        quality.traces_folder()  # before minutes of work
    except TracesMissing as error:
        sys.stderr.write(f"{error}\n")
        return 2
    figures = index_speed.measure()
    figures |= placement_speed.measure()
    figures |= quality.measure()
    report.write("router", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
