"""Matrices that stay block-FP8 on the device, and the products made with them.

Activations lose nothing: FP8 tensor cores multiply them in two parts. On a CPU device it is the
same arithmetic in plain torch, for tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from shared.engine.kernels.grouped_fp8 import grouped_fp8
from shared.engine.kernels.reference import fp8_products as reference
from shared.engine.kernels.split_rows import BLOCK, SplitRows, split_gated, split_rows
from shared.engine.model.weights import StoredWeight
from shared.errors import ConfigError

_ALL_ROWS = 2**31 - 1


class _Operations(NamedTuple):
    split_rows: Callable[..., SplitRows]
    split_gated: Callable[..., SplitRows]
    grouped: Callable[..., None]


_KERNELS = _Operations(split_rows, split_gated, grouped_fp8)
_MEANINGS = _Operations(reference.split_rows, reference.split_gated, reference.grouped_fp8)


def _operations(device: torch.device) -> _Operations:
    return _KERNELS if device.type == "cuda" else _MEANINGS


@dataclass(frozen=True)
class Fp8Matrix:
    """Codes and scales, filled up with zeros to whole blocks."""

    codes: torch.Tensor  # [out, in] e4m3
    scales: torch.Tensor  # [out / 128, in / 128] fp32
    width: int  # how many rows of codes are a product's columns


def fp8_matrix(weight: StoredWeight, device: torch.device) -> Fp8Matrix:
    """A stored block-FP8 matrix on the device.

    ValueError if it has no scales, ConfigError if it holds NaN: widened codes are numbers always.
    """
    if weight.scale_inv is None:
        raise ValueError("a matrix without scales is not block-FP8")
    width, inner = weight.values.shape
    codes = weight.values.to(device).view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise ConfigError(f"a block-FP8 matrix of {width} x {inner} holds NaN")
    codes = F.pad(codes, (0, -inner % BLOCK, 0, -width % BLOCK)).contiguous()
    scales = weight.scale_inv.to(device, torch.float32).contiguous()
    return Fp8Matrix(codes.view(torch.float8_e4m3fn), scales, width)


def joined(first: Fp8Matrix, second: Fp8Matrix) -> Fp8Matrix:
    """The one over the other, their filling kept: blocks of rows share scales."""
    codes = torch.cat((first.codes.view(torch.uint8), second.codes.view(torch.uint8)))
    scales = torch.cat((first.scales, second.scales))
    return Fp8Matrix(codes.view(torch.float8_e4m3fn), scales, len(codes))


class Fp8Dense:
    """One matrix: a product of one group."""

    def __init__(self, matrix: Fp8Matrix) -> None:
        self._matrix = matrix.codes[None], matrix.scales[None]
        self._width = matrix.width
        self._end = torch.tensor([_ALL_ROWS], dtype=torch.int32, device=matrix.codes.device)
        self._operations = _operations(matrix.codes.device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Product."""
        out = rows.new_empty((len(rows), self._width))
        self._operations.grouped(self._operations.split_rows(rows), *self._matrix, self._end, out)
        return out


class Fp8Mlps:
    """Gated MLPs of adjacent experts, in block-FP8."""

    def __init__(self, gate_up: Sequence[Fp8Matrix], down: Sequence[Fp8Matrix]) -> None:
        self._gate_up, self._down = _stacked(gate_up), _stacked(down)
        self._operations = _operations(down[0].codes.device)

    def __len__(self) -> int:
        return len(self._down[0])

    def __call__(
        self,
        hidden: torch.Tensor,
        sources: torch.Tensor,
        ends: torch.Tensor,
        outputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """See GroupedMlps."""
        num_rows, operations = ends[-1:], self._operations
        gate_up = hidden.new_empty((len(sources), self._gate_up[0].shape[1]))
        rows = operations.split_rows(hidden, sources, num_rows)
        operations.grouped(rows, *self._gate_up, ends, gate_up)
        inner = operations.split_gated(gate_up, num_rows)
        operations.grouped(inner, *self._down, ends, outputs, targets)


def _stacked(matrices: Sequence[Fp8Matrix]) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.stack([matrix.codes.view(torch.uint8) for matrix in matrices])
    return codes.view(torch.float8_e4m3fn), torch.stack([matrix.scales for matrix in matrices])
