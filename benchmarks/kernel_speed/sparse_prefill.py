"""Sparse MLA prefill: 4,096 queries of 64 heads, 2,048 uniformly random rows each.

Random rows are the worst case for the cache. Beside rows that lie in the cache the matrix units are
the bound, with a million rows the memory: a query's 285 MFLOP need 2.36 MB of rows.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.kernel_speed.rates import Rates, Row, time_ms
from shared.engine.kernels.dequantise_rows import dequantise_range
from shared.engine.kernels.rows import PAGE_ROWS, ROW_BYTES
from shared.engine.kernels.sparse_mla_prefill import sparse_mla_prefill

_QUERIES, _HEADS, _TOPK = 4096, 64, 2048
_LATENT, _VALUE = 576, 512
_SCALE = 1 / 16
_FLOP = _QUERIES * _HEADS * _TOPK * (_LATENT + _VALUE) * 2
_FLOP_PER_BYTE = 121  # of gathered bf16 rows


class _Shape(NamedTuple):
    name: str
    num_rows: int
    bar: float
    fp8_bar: float


_SHAPES = (
    _Shape("64k", 65_536, 0.71, 0.69),
    _Shape("1m", 1_048_576, 0.82, 0.68),
)


def measure(rates: Rates) -> Iterator[Row]:
    """Rows of bf16, then fp8_ds_mla rows with the pass that dequantises all of them."""
    query = torch.randn(_QUERIES, _HEADS, _LATENT, device="cuda").bfloat16()
    for shape in _SHAPES:
        bound = rates.bf16_flop_per_s
        if shape.name == "1m":
            bound = _FLOP_PER_BYTE * rates.copy_bytes_per_s
        chosen = torch.randint(shape.num_rows, (_QUERIES, _TOPK), device="cuda", dtype=torch.int32)
        rows = torch.randn(shape.num_rows, _LATENT, device="cuda", dtype=torch.bfloat16)

        def attend(rows: torch.Tensor = rows, chosen: torch.Tensor = chosen) -> None:
            sparse_mla_prefill(query, rows, chosen, _SCALE)

        yield _row(f"mla_prefill_{shape.name}", "bf16 rows", shape, attend, bound, shape.bar)

        pages = _pages(shape.num_rows)

        def dequantise_and_attend(
            pages: torch.Tensor = pages, rows: torch.Tensor = rows, chosen: torch.Tensor = chosen
        ) -> None:
            dequantise_range(pages, 0, rows)
            sparse_mla_prefill(query, rows, chosen, _SCALE)

        yield _row(
            f"mla_fp8_{shape.name}",
            "fp8 rows, dequantised first",
            shape,
            dequantise_and_attend,
            bound,
            shape.fp8_bar,
        )


def _row(
    figure: str, rows: str, shape: _Shape, run: Callable[[], None], bound: float, bar: float
) -> Row:
    time = time_ms(run)
    rate = _FLOP / time * 1e3
    return Row(
        figure=figure,
        kernel=f"sparse MLA prefill, {rows}",
        shape=f"{_QUERIES} queries x {_HEADS} heads x {_TOPK} of {shape.num_rows} rows",
        time_ms=time,
        rate=f"{rate / 1e12:.0f} TFLOP/s",
        ratio=rate / bound,
        bar=bar,
    )


def _pages(num_rows: int) -> torch.Tensor:
    """fp8_ds_mla rows of unit normals, with scales of one."""
    pages = torch.empty(num_rows, ROW_BYTES, device="cuda", dtype=torch.uint8)
    latent = torch.randn(num_rows, _LATENT, device="cuda", dtype=torch.bfloat16)
    pages[:, :_VALUE] = latent[:, :_VALUE].to(torch.float8_e4m3fn).view(torch.uint8)
    pages[:, _VALUE : _VALUE + 16] = torch.ones(4, device="cuda").view(torch.uint8)
    pages[:, _VALUE + 16 :] = latent[:, _VALUE:].contiguous().view(torch.uint8)
    return pages.view(-1, PAGE_ROWS, ROW_BYTES)
