"""Meaning of the kernels by which decode attends to its selected rows."""

import torch

_RANK = 512
_SCALES_END = 528


def sparse_mla_decode(
    query: torch.Tensor,  # [num_queries, num_heads, 576]
    rows: torch.Tensor,  # [num_rows, 656] uint8
    row_ids: torch.Tensor,  # [num_queries, top_k] integers, -1 = none
    scale: float,
    hot_rows: torch.Tensor | None = None,  # [num_hot_rows, 656] uint8, numbered after rows
) -> tuple[torch.Tensor, torch.Tensor]:  # [num_queries, num_heads, 512], [.., num_heads] fp32
    """Softmax attention of each query over its own rows, and the natural logarithm of its sum."""
    is_valid = (row_ids >= 0).unsqueeze(1)
    latent = decode_rows(_pick(rows, row_ids, hot_rows))
    scores = torch.matmul(query.float(), latent.mT) * scale
    scores = scores.masked_fill(~is_valid, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - _finite(lse).unsqueeze(-1))
    return torch.matmul(weights, latent[..., :_RANK]), lse


def combine_splits(
    outputs: torch.Tensor,  # [num_queries, num_splits, num_heads, 512] fp32
    lses: torch.Tensor,  # [num_queries, num_splits, num_heads] fp32; -inf: its output is not read
) -> tuple[torch.Tensor, torch.Tensor]:  # [num_queries, num_heads, 512], [.., num_heads] fp32
    """Attention over the union of disjoint sets of rows, from attention over each of them."""
    lse = torch.logsumexp(lses, 1)
    weights = torch.exp(lses - _finite(lse).unsqueeze(1)).unsqueeze(-1)
    return torch.where(weights == 0, 0, weights * outputs).sum(1), lse


def decode_rows(
    stored: torch.Tensor,  # [..., 656] uint8
) -> torch.Tensor:  # [..., 576] fp32
    """The values of fp8_ds_mla rows."""
    values = stored[..., :_RANK].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = stored[..., _RANK:_SCALES_END].contiguous().view(torch.float32)
    rope = stored[..., _SCALES_END:].contiguous().view(torch.bfloat16)
    return torch.cat(((values * scales.unsqueeze(-1)).flatten(-2), rope.float()), -1)


def _pick(
    rows: torch.Tensor, row_ids: torch.Tensor, hot_rows: torch.Tensor | None
) -> torch.Tensor:  # [num_queries, top_k, 656]
    ids = row_ids.long()
    picked = rows.new_zeros((*ids.shape, rows.shape[1]))
    is_resident = (ids >= 0) & (ids < len(rows))
    picked[is_resident] = rows[ids[is_resident]]
    if hot_rows is not None:
        is_hot = ids >= len(rows)
        picked[is_hot] = hot_rows[ids[is_hot] - len(rows)]
    return picked


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0, lse)
