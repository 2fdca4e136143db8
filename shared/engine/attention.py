"""Choosing positions and attending to them, on CPU tensors.

Order never depends on the composition: positions are chosen by (score descending, position
ascending) and attended in ascending order, so a query's result depends on its own row and the
cached rows alone. This module is also the meaning of the GPU kernels to come.
"""

from collections.abc import Callable, Sequence

import torch

from shared.engine.tiles import padded, spread

# Tiles stay in the cores' caches and their buffers are reused: a fresh allocation per tile costs
# more in page faults than the arithmetic (docs/LOG.md, 2026-11-30).
_TILE_SCORES = 1 << 19  # fp32 per-head scores held at once while choosing
_TILE_ROWS = 1 << 11  # gathered rows held at once while attending

# Scores are summed in whole vectors: behind them, and in rows that begin inside one, the sum over
# heads has other last bits, and equal scores would not be equal.
KEY_STEP = 16

Select = Callable[..., torch.Tensor]  # select_positions, or a test's injected choice

_WIDTHS = tuple(1 << bits for bits in range(5, 11))  # of queries with few places


def select_positions(
    query: torch.Tensor,  # [n, index_heads, index_dim] fp32, rounded as the format wants
    weights: torch.Tensor,  # [n, index_heads] fp32, scales included
    keys: torch.Tensor,  # [num_keys, index_dim] fp32, in position order
    limits: torch.Tensor,  # [n] int64: query i may choose positions first..limits[i]
    first: int,
    topk: int,
) -> torch.Tensor:  # [n, topk] int64 ascending, then -1 = none
    """The topk positions with the highest score sum_h w_h relu(q_h . k)."""
    num_queries, num_keys = query.shape[0], keys.shape[0]
    if num_keys - first <= topk:
        return _pad(_all_positions(limits, first, num_keys), topk)
    chosen = query.new_empty((num_queries, topk), dtype=torch.int64)
    keys = padded(keys, KEY_STEP)
    tile = max(1, _TILE_SCORES // (query.shape[1] * len(keys)))

    def select(begins: Sequence[int]) -> None:
        per_head = query.new_empty(min(tile, num_queries) * query.shape[1] * len(keys))
        for begin in begins:
            part = slice(begin, begin + tile)
            visible = int(limits[part].max()) + 1  # later keys are nobody's here
            if visible - first <= topk:
                chosen[part] = _pad(_all_positions(limits[part], first, visible), topk)
                continue
            seen = keys[: -(-visible // KEY_STEP) * KEY_STEP]
            scores = index_scores(query[part], weights[part], seen, per_head)
            chosen[part] = best_positions(scores, limits[part], first, topk)

    spread(select, range(0, num_queries, tile))
    return chosen


def index_scores(
    query: torch.Tensor,  # [n, heads, dim]
    weights: torch.Tensor,  # [n, heads]
    keys: torch.Tensor,  # [num_keys, dim], num_keys a multiple of KEY_STEP
    buffer: torch.Tensor,  # [>= n * heads * num_keys] fp32, overwritten
) -> torch.Tensor:  # [n, num_keys] fp32
    """The lightning indexer's score of every key for every query, each by itself."""
    assert keys.shape[0] % KEY_STEP == 0, f"{keys.shape[0]} keys"
    num_rows = query.shape[0] * query.shape[1]
    per_head = buffer[: num_rows * keys.shape[0]].view(num_rows, keys.shape[0])
    torch.mm(query.flatten(0, 1), keys.T, out=per_head).relu_()
    return torch.bmm(weights.unsqueeze(1), per_head.unflatten(0, query.shape[:2])).squeeze(1)


def _pad(chosen: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - chosen.shape[1]
    return torch.nn.functional.pad(chosen, (0, missing), value=-1)[:, :width]


def _all_positions(limits: torch.Tensor, first: int, num_keys: int) -> torch.Tensor:
    positions = torch.arange(first, num_keys).expand(len(limits), -1)
    return torch.where(positions <= limits[:, None], positions, -1)


def best_positions(
    scores: torch.Tensor,  # [n, num_keys] fp32, changed in place
    limits: torch.Tensor,  # [n] int64: query i may choose positions first..limits[i]
    first: int,
    width: int,
) -> torch.Tensor:  # [n, width] int64 ascending, -1 = none
    """The best allowed positions of each query; equal scores go to the lower position."""
    positions = torch.arange(scores.shape[1])
    scores[:, :first] = -torch.inf
    scores.masked_fill_(positions > limits[:, None], -torch.inf)
    chosen = top_positions(scores, width)
    taken = scores.gather(1, chosen) > -torch.inf
    last = scores.shape[1]
    # Unused places sort behind every position, then become -1.
    ascending = torch.where(taken, chosen, last).sort(-1).values
    return ascending.masked_fill_(ascending == last, -1)


def top_positions(
    scores: torch.Tensor,  # [n, num_keys] fp32
    width: int,
) -> torch.Tensor:  # [n, width] int64, unordered
    """The width best columns of each row; equal scores go to the lower column."""
    values, chosen = scores.topk(width, -1, sorted=True)
    threshold = values[:, -1:]
    num_equal = (scores == threshold).sum(-1)
    num_wanted = (values == threshold).sum(-1)
    for row in torch.nonzero(num_equal > num_wanted).flatten().tolist():
        above = torch.nonzero(scores[row] > threshold[row]).flatten()
        equal = torch.nonzero(scores[row] == threshold[row]).flatten()
        chosen[row] = torch.cat((above, equal[: width - len(above)]))
    return chosen


def sparse_attention(
    query: torch.Tensor,  # [n, heads, latent_dim] fp32
    rows: torch.Tensor,  # [num_rows, latent_dim] fp32
    chosen: torch.Tensor,  # [n, topk] int64 row of each attended position, -1 = none
    value_dim: int,
    scale: float,
) -> torch.Tensor:  # [n, heads, value_dim] fp32; zero for a query without positions
    """Softmax attention of each query over its own rows; a row's first value_dim elements are its
    value. A query's bits do not depend on the others.
    """
    out = query.new_empty((*query.shape[:2], value_dim))
    tiles = attention_tiles(chosen)

    def attend(numbers: Sequence[int]) -> None:
        buffer = rows.new_empty((max(_TILE_ROWS, chosen.shape[1]), rows.shape[1]))
        for part, width in (tiles[number] for number in numbers):
            places = chosen[part, :width]
            is_valid = places >= 0
            is_full = bool(is_valid.all())  # past the first top-k positions nothing needs a mask
            gathered = buffer[: places.numel()]
            flat = (places if is_full else places.clamp_min(0)).flatten()
            torch.index_select(rows, 0, flat, out=gathered)
            gathered = gathered.unflatten(0, places.shape)
            out[part] = attend_gathered(
                query[part], gathered, None if is_full else is_valid, value_dim, scale
            )

    spread(attend, range(len(tiles)))
    return out


def attention_tiles(chosen: torch.Tensor) -> list[tuple[slice, int]]:
    """Queries to attend at once, and how many of their places.

    A query's width follows from its own places alone: with another one softmax and values add up in
    another order, and a prompt's KV would depend on where its chunks end.
    """
    topk = chosen.shape[1]
    if not chosen.numel():
        return [(slice(0, len(chosen)), topk)]
    num_places = torch.where(chosen >= 0, torch.arange(1, topk + 1), 0).amax(-1)
    widths = [width for width in _WIDTHS if width < topk] + [topk]
    classes = torch.bucketize(num_places, torch.tensor(widths[:-1]))
    tiles, begin = [], 0
    for number, count in zip(
        *map(torch.Tensor.tolist, torch.unique_consecutive(classes, return_counts=True)),
        strict=True,
    ):
        width, end = widths[number], begin + count
        step = max(1, _TILE_ROWS // width)
        tiles += [(slice(at, min(at + step, end)), width) for at in range(begin, end, step)]
        begin = end
    return tiles


def attend_gathered(
    query: torch.Tensor,  # [n, heads, latent_dim]
    gathered: torch.Tensor,  # [n, width, latent_dim]
    is_valid: torch.Tensor | None,  # [n, width] bool; None = all
    value_dim: int,
    scale: float,
) -> torch.Tensor:  # [n, heads, value_dim]
    """sparse_attention once the rows are gathered."""
    scores = torch.bmm(query, gathered.transpose(1, 2)).mul_(scale)
    values = gathered[..., :value_dim]
    if is_valid is None:
        return torch.bmm(torch.softmax(scores, -1), values)
    # A finite floor instead of -inf: a query with no position must give zeros, not NaN.
    scores.masked_fill_(~is_valid.unsqueeze(1), torch.finfo(scores.dtype).min)
    probabilities = torch.softmax(scores, -1).mul_(is_valid.unsqueeze(1))
    return torch.bmm(probabilities, values)
