"""Speed of the kernels that write, read and reorder KV rows: bytes read and written over time.

A figure is its slowest case.
"""

from collections.abc import Callable, Iterator

import torch

from benchmarks.kernel_speed.rates import Rates, Row, graph_time_ms
from shared.engine.kernels.dequantise_rows import dequantise_range, dequantise_rows
from shared.engine.kernels.insert_keys import insert_keys
from shared.engine.kernels.insert_rows import insert_rows
from shared.engine.kernels.relayout import to_shards, to_token_order
from shared.engine.kv.layout import Sharding

_NUM_ROWS = 2**20
_NUM_PAGES = _NUM_ROWS // 64
_BAR = 0.7
_NUM_CALLS = 100
_ID_BYTES = 8


def measure(rates: Rates) -> Iterator[Row]:
    """All kernels at 1 Mi rows; pages in random order where an order is given."""
    for figure, family in (
        ("kv_insert", _insert),
        ("dequant", _dequantise),
        ("relayout", _relayout),
    ):
        rows = [_row(rates, *case) for case in family()]
        slowest = min(rows, key=lambda row: row.ratio)
        yield from (row._replace(figure=figure) if row is slowest else row for row in rows)


_Case = tuple[str, str, Callable[[], None], int]  # kernel, shape, call, bytes a row


def _row(rates: Rates, kernel: str, shape: str, call: Callable[[], None], row_bytes: int) -> Row:
    milliseconds = graph_time_ms(call, _NUM_CALLS)
    speed = _NUM_ROWS * row_bytes / milliseconds * 1e3
    return Row(
        figure="",
        kernel=kernel,
        shape=shape,
        time_ms=milliseconds,
        rate=f"{speed / 1e12:.2f} TB/s",
        ratio=speed / rates.copy_bytes_per_s,
        bar=_BAR,
    )


def _slots() -> torch.Tensor:
    pages = torch.randperm(_NUM_PAGES, device="cuda")
    return (pages[:, None] * 64 + torch.arange(64, device="cuda")).flatten()


def _bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device="cuda")


def _latent(width: int) -> torch.Tensor:
    return torch.randn(_NUM_ROWS, width, dtype=torch.bfloat16, device="cuda")


def _insert() -> Iterator[_Case]:
    slots, latent, pages = _slots(), _latent(576), _bytes(_NUM_PAGES, 64, 656)
    yield (
        "insert_rows",
        "1 Mi rows, pages in random order",
        lambda: insert_rows(latent, slots, pages),
        1152 + 656 + _ID_BYTES,
    )
    keys, key_pages = _latent(128), _bytes(_NUM_PAGES, 8448)
    yield (
        "insert_keys",
        "1 Mi keys, pages in random order",
        lambda: insert_keys(keys, slots, key_pages),
        256 + 132 + _ID_BYTES,
    )


def _dequantise() -> Iterator[_Case]:
    slots, pages, out = _slots(), _bytes(_NUM_PAGES, 64, 656), _latent(576)
    insert_rows(out, slots, pages)
    yield (
        "dequantise_range",
        "1 Mi rows",
        lambda: dequantise_range(pages, 0, out),
        656 + 1152,
    )
    yield (
        "dequantise_rows",
        "1 Mi rows, pages in random order",
        lambda: dequantise_rows(pages, slots, out),
        656 + 1152 + _ID_BYTES,
    )


def _relayout() -> Iterator[_Case]:
    for ranks, interleave, row_bytes in (
        (8, 1, 656),
        (8, 64, 656),
        (2, 1, 656),
        (8, 1, 132),
        (8, 64, 132),
    ):
        sharding = Sharding(ranks, interleave)
        shards = _bytes(ranks, _NUM_PAGES // ranks, 64, row_bytes)
        tokens = _bytes(_NUM_PAGES, 64, row_bytes)
        shape = f"1 Mi rows of {row_bytes} B, {ranks} ranks, I = {interleave}"
        yield (
            "relayout, to token order",
            shape,
            lambda shards=shards, sharding=sharding, tokens=tokens: to_token_order(  # type: ignore[misc]
                shards, sharding, _NUM_ROWS, tokens
            ),
            2 * row_bytes,
        )
        yield (
            "relayout, to shards",
            shape,
            lambda shards=shards, sharding=sharding, tokens=tokens: to_shards(  # type: ignore[misc]
                tokens, sharding, _NUM_ROWS, shards
            ),
            2 * row_bytes,
        )
