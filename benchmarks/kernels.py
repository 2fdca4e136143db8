"""Every GPU kernel at its shapes, as ratios to what the same card does in the same run.

Prints the table of bars, writes benchmarks/results/kernels.json. Needs an H200 (README.md).
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import report
from benchmarks.kernel_speed import (
    fp8_products,
    indexing,
    kv_rows,
    rates,
    residency,
    sparse_decode,
    sparse_prefill,
)
from benchmarks.kernel_speed.rates import Rates, Row

_FAMILIES: Sequence[Callable[[Rates], Iterator[Row]]] = (
    sparse_prefill.measure,
    sparse_decode.measure,
    indexing.measure,
    kv_rows.measure,
    residency.measure,
    fp8_products.measure,
)
_COLUMNS = "{:<24} {:<34} {:<44} {:>10} {:>16} {:>9} {:>7}"


def main() -> int:
    """Measure; 1 if a bar is missed."""
    if not torch.cuda.is_available():
        sys.stderr.write("these are GPU kernels, and there is no CUDA device\n")
        return 2
    card = rates.measure()
    print(
        f"{torch.cuda.get_device_name()}: copy {card.copy_bytes_per_s / 1e12:.2f} TB/s, matrix"
        f" products {card.bf16_flop_per_s / 1e12:.0f} TFLOP/s in bf16,"
        f" {card.fp8_flop_per_s / 1e12:.0f} in FP8, all sustained"
    )
    print(_COLUMNS.format("figure", "kernel", "shape", "ms", "rate", "ratio", "bar"), flush=True)
    figures, missed = {}, []
    for family in _FAMILIES:
        for row in family(card):
            print(_line(row), flush=True)
            if row.figure:
                figures[row.figure] = row.ratio
                if not row.is_met:
                    missed.append(row.figure)
        torch.cuda.empty_cache()
    figures |= {
        "copy_tb_per_s": card.copy_bytes_per_s / 1e12,
        "bf16_tflop_per_s": card.bf16_flop_per_s / 1e12,
        "fp8_tflop_per_s": card.fp8_flop_per_s / 1e12,
    }
    report.write("kernels", figures)
    print(f"missed: {', '.join(missed)}" if missed else "every bar is met")
    return 1 if missed else 0


def _line(row: Row) -> str:
    sign = "<=" if row.is_better_below else ">="
    bar = f"{sign}{row.bar:g}" if row.figure else ""
    return _COLUMNS.format(
        row.figure, row.kernel, row.shape, f"{row.time_ms:.4f}", row.rate, f"{row.ratio:.3f}", bar
    )


if __name__ == "__main__":
    sys.exit(main())
