"""Sparse MLA over bf16 rows, query by query."""

import torch


def sparse_mla_prefill(
    query: torch.Tensor,  # [num_queries, heads, latent_dim]
    rows: torch.Tensor,  # [num_rows, latent_dim]
    chosen: torch.Tensor,  # [num_queries, topk] integer row numbers, -1 = none
    value_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [num_queries, heads, value_dim], [num_queries, heads]
    """What each head attends to, and the natural logarithm of its softmax's sum; both fp32.

    A query without rows gets zeros and -inf.
    """
    num_queries, heads, _ = query.shape
    out = query.new_zeros((num_queries, heads, value_dim), dtype=torch.float32)
    lse = query.new_full((num_queries, heads), -torch.inf, dtype=torch.float32)
    for number in range(num_queries):
        live = chosen[number][chosen[number] >= 0]
        if len(live):
            gathered = rows[live.long()].float()
            scores = query[number].float() @ gathered.T * scale
            out[number] = scores.softmax(-1) @ gathered[:, :value_dim]
            lse[number] = scores.logsumexp(-1)
    return out, lse
