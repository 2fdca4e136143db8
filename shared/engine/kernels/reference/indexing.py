"""Meaning of the kernels that score keys and choose the best."""

import torch

from shared.engine.kv.layout import BLOCK_TOKENS

_DIM = 128


def index_scores(
    query: torch.Tensor,  # [n, heads, 128] any float dtype
    weights: torch.Tensor,  # [n, heads] fp32
    keys: torch.Tensor,  # [num_keys, 128] any float dtype
    key_scales: torch.Tensor,  # [num_keys] fp32
) -> torch.Tensor:  # [n, num_keys] fp32
    """key_scale * sum_h weight_h * relu(query_h . key)."""
    per_head = torch.relu(torch.einsum("qhd,kd->qhk", query.float(), keys.float()))
    return torch.einsum("qhk,qh->qk", per_head, weights) * key_scales


def indexer_logits(
    query: torch.Tensor,  # [num_queries, heads, 128] e4m3
    weights: torch.Tensor,  # [num_queries, heads] fp32
    keys: torch.Tensor,  # [num_keys, 128] e4m3
    key_scales: torch.Tensor,  # [num_keys] fp32
    starts: torch.Tensor,  # [num_queries] int32
    ends: torch.Tensor,  # [num_queries] int32
    logits: torch.Tensor,  # [num_queries, num_columns] fp32, changed in place
) -> None:
    """Column j of row i becomes the score of key starts[i] + j, up to ends[i]; others stay."""
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start < end:
            one, seen = slice(row, row + 1), slice(start, end)
            scores = index_scores(query[one], weights[one], keys[seen], key_scales[seen])
            logits[row, : end - start] = scores[0]


def paged_indexer(
    query: torch.Tensor,  # [num_requests, num_tokens, heads, 128] e4m3
    weights: torch.Tensor,  # [num_requests, num_tokens, heads] fp32
    pages: torch.Tensor,  # [num_pages, 64 * 132] uint8
    page_table: torch.Tensor,  # [num_requests, max_pages] int32
    limits: torch.Tensor,  # [num_requests, num_tokens] int32
    logits: torch.Tensor,  # [num_requests, num_tokens, num_columns] fp32, changed in place
) -> None:
    """Column j of a query's row becomes the score of key j, for j below its limit; others stay."""
    for request, (table, limit) in enumerate(zip(page_table, limits.tolist(), strict=True)):
        num_keys = max(limit, default=0)
        of_request = pages[table[: -(-num_keys // BLOCK_TOKENS)].long()]
        values, scales = of_request.split((BLOCK_TOKENS * _DIM, BLOCK_TOKENS * 4), 1)
        keys = values.reshape(-1, _DIM).view(torch.float8_e4m3fn)
        key_scales = scales.contiguous().view(torch.float32).flatten()
        scores = index_scores(query[request], weights[request], keys, key_scales)
        for token, end in enumerate(limit):
            logits[request, token, :end] = scores[token, :end]


def top_k(
    scores: torch.Tensor,  # [num_rows, num_columns] fp32
    lengths: torch.Tensor,  # [num_rows] int32
    k: int,
    first: int = 0,
) -> torch.Tensor:  # [num_rows, k] int32
    """first + the k best of each row's first lengths[i] columns, ascending, then -1.

    Equal scores go to the lower column; -0 equals 0, and NaN is below everything.
    """
    chosen = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
    for row, length in enumerate(lengths.tolist()):
        seen = scores[row, :length]
        # A stable sort by score, after one by "is it a number": the second decides.
        by_score = torch.sort(seen.nan_to_num(-torch.inf), descending=True, stable=True).indices
        is_nan = seen[by_score].isnan()
        order = torch.cat((by_score[~is_nan], by_score[is_nan]))
        best = order[:k].sort().values
        chosen[row, : len(best)] = best + first
    return chosen
