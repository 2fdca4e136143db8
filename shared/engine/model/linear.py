"""A weight matrix as products need it: packed once, and blind to who shares its batch.

On CPU through oneDNN. torch's plain product packs the weights again at every call, which costs
three times the arithmetic at few rows, and adds up in another order for few rows than for many
(docs/LOG.md, 2026-11-30).
"""

import logging
from functools import cache, partial

import torch

from shared.engine.tiles import padded

logger = logging.getLogger(__name__)

_MOST_ROWS = 512  # at once; more are computed one after the other
_PROBES = (2, 3, 8, 15, 16, 17, 33, 64, 100, _MOST_ROWS)
_TILE_ROWS = 16


class Linear:
    """rows @ weight.T, where a row's bits do not depend on how many rows stand beside it."""

    def __init__(self, weight: torch.Tensor) -> None:  # [out, in] on CPU, fp32 or bf16
        self._packed = _pack(weight)
        self._tile_rows = _tile_rows(weight.shape[0], weight.shape[1], weight.dtype)

    def __call__(
        self,
        rows: torch.Tensor,  # [n, in] of the weight's dtype
    ) -> torch.Tensor:  # [n, out]
        """The product."""
        num_rows = len(rows)
        if num_rows == 1:
            # A lone row is multiplied as a vector, which adds up in another order.
            return self(torch.cat((rows, rows)))[:1]
        if self._tile_rows:
            return _in_tiles(self._packed, padded(rows, self._tile_rows), self._tile_rows)[
                :num_rows
            ]
        return _in_tiles(self._packed, rows, _MOST_ROWS)

    @property
    def weight(self) -> torch.Tensor:  # [out, in]
        """The matrix, unpacked."""
        unpacked: torch.Tensor = self._packed.to_dense()
        return unpacked


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _product(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    return product


def _in_tiles(packed: torch.Tensor, rows: torch.Tensor, tile_rows: int) -> torch.Tensor:
    if len(rows) <= tile_rows:
        return _product(packed, rows)
    # Equal parts: a lone row must not be left over.
    parts = rows.tensor_split(-(-len(rows) // tile_rows))
    return torch.cat([_product(packed, part) for part in parts])


@cache
def _tile_rows(num_out: int, num_in: int, dtype: torch.dtype) -> int:
    """How many rows each product of this shape must have on this processor; 0 = any from two on.

    Which kernel oneDNN takes follows from the shape and the processor's caches, and is not told;
    so it is tried. Always the same number of rows is always the same kernel.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = partial(torch.randn, generator=generator)
    packed = _pack(numbers(num_out, num_in).to(dtype))
    rows = numbers(_MOST_ROWS, num_in).to(dtype)
    whole = _product(packed, rows)
    if all(torch.equal(_product(packed, rows[:count]), whole[:count]) for count in _PROBES):
        return 0
    logger.info("products of %d x %d take %d rows at a time here", num_out, num_in, _TILE_ROWS)
    return _TILE_ROWS
