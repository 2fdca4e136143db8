"""Meaning of the kernels that multiply block-FP8 matrices."""

import torch
import torch.nn.functional as F

from shared.engine.kernels.split_rows import SplitRows
from shared.engine.kv.format import quantise_tiles
from shared.engine.model.weights import dequantise_blocks

_BLOCK = 128


def split_rows(
    rows: torch.Tensor,  # [m, width]
    sources: torch.Tensor | None = None,  # [n] int64
    num_rows: torch.Tensor | None = None,  # [1] int32
) -> SplitRows:
    """Rounded to e4m3, and what that leaves over rounded to e4m3, by the same power of two."""
    if sources is not None:
        rows = rows[sources]
    if num_rows is not None:
        live = torch.arange(len(rows), device=rows.device) < num_rows
        rows = torch.where(live[:, None], rows, 0)
    values = F.pad(rows.float(), (0, -rows.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    high, scales = quantise_tiles(values)
    scaled = values / scales[..., None]
    low = (scaled - high.float()).to(torch.float8_e4m3fn)
    parts = torch.stack([part.flatten(1).view(torch.uint8) for part in (high, low)])
    return SplitRows(parts.view(torch.float8_e4m3fn), scales.t().contiguous().t())


def split_gated(
    gate_up: torch.Tensor,  # [n, 2 * inner] bf16
    num_rows: torch.Tensor | None = None,  # [1] int32
) -> SplitRows:
    """The same of silu(gate) * up, in fp32."""
    gate, up = gate_up.float().chunk(2, -1)
    return split_rows(F.silu(gate) * up, num_rows=num_rows)


def grouped_fp8(
    rows: SplitRows,  # n of them
    weight: torch.Tensor,  # [groups, out, in] e4m3
    weight_scales: torch.Tensor,  # [groups, out / 128, in / 128] fp32
    ends: torch.Tensor,  # [groups] int32
    out: torch.Tensor,  # [m, width] bf16, written in place
    targets: torch.Tensor | None = None,  # [n] int64
) -> None:
    """Products of the whole rows with the dequantised matrix of their group, in fp32."""
    high, low = rows.parts.float()
    values = (high + low) * rows.scales.repeat_interleave(_BLOCK, 1)
    if targets is None:
        targets = torch.arange(len(values), device=values.device)
    start = 0
    for matrix, scales, end in zip(weight, weight_scales, ends.tolist(), strict=True):
        dense = dequantise_blocks(matrix, scales)[: out.shape[1]]
        out[targets[start:end]] = (values[start:end] @ dense.T).to(out.dtype)
        start = end
