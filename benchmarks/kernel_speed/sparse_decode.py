"""Decode's attention over selected FP8 rows: gathered bytes a second over copy bandwidth."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernel_speed.rates import Rates, Row, graph_time_ms
from shared.engine.kernels.sparse_mla_decode import sparse_mla_decode

_NUM_ROWS = 1 << 20  # far more than the L2 cache holds
_ROW_BYTES = 656
_TOP_K = 2048
# Queries and their bars; the others are only shown. 1,024 are 256 requests of four tokens.
_BARS = {8: 0.08, 64: 0.21, 256: 0.30}
_BATCHES = (1, 8, 32, 64, 128, 256, 1024)


def measure(rates: Rates) -> Iterator[Row]:
    """Time of whole calls, splitting and combining included, replayed as a graph."""
    rows = _random_rows()
    for num_queries in _BATCHES:
        query = torch.randn(num_queries, 64, 576, device="cuda").bfloat16()
        row_ids = torch.randint(_NUM_ROWS, (num_queries, _TOP_K), device="cuda").int()
        call = partial(sparse_mla_decode, query, rows, row_ids, 1 / 16)
        time_ms = graph_time_ms(call)
        bytes_per_s = num_queries * _TOP_K * _ROW_BYTES / time_ms * 1e3
        yield Row(
            figure=f"mla_decode_b{num_queries}" if num_queries in _BARS else "",
            kernel="sparse MLA decode, FP8 rows",
            shape=f"{num_queries} queries x 64 heads x {_TOP_K} of {_NUM_ROWS} rows",
            time_ms=time_ms,
            rate=f"{bytes_per_s / 1e12:.2f} TB/s gathered",
            ratio=bytes_per_s / rates.copy_bytes_per_s,
            bar=_BARS.get(num_queries, 0.0),
        )


def _random_rows() -> torch.Tensor:  # [_NUM_ROWS, 656] uint8
    values = (100 * torch.randn(_NUM_ROWS, 512, device="cuda")).clamp(-448, 448)
    scales = torch.exp2(torch.randint(-8, -4, (_NUM_ROWS, 4), device="cuda").float())
    rope = torch.randn(_NUM_ROWS, 64, device="cuda").bfloat16()
    parts = (values.to(torch.float8_e4m3fn), scales, rope)
    return torch.cat([part.view(torch.uint8) for part in parts], 1)
