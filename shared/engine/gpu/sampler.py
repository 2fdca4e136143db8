"""Draws tokens on the device: the same rules as `shared.engine.sampler`, for a batch at once.

Nothing is read back: the host knows which rows are greedy before the step runs.
"""

from collections.abc import Sequence

import numpy as np
import torch

from shared.engine.gpu.transfers import sent
from shared.engine.sampler import uniform
from shared.engine.step import Sampling

_ROWS_AT_ONCE = 16  # sorting takes some 50 bytes a logit: 130 MB with GLM-5.3's vocabulary


def draw(
    logits: torch.Tensor,  # [n, vocab] fp32, changed in place
    samplings: Sequence[Sampling],
) -> torch.Tensor:  # [n] int64 token ids; -1 where the logits are not finite
    """One token a row. Greedy ties go to the lower id."""
    _ban(logits, samplings)
    is_finite = torch.isfinite(logits.amax(-1))
    token_ids = logits.argmax(-1)
    drawn = [number for number, each in enumerate(samplings) if each.temperature > 0.0]
    for first in range(0, len(drawn), _ROWS_AT_ONCE):
        part = drawn[first : first + _ROWS_AT_ONCE]
        rows = sent(np.array(part, np.int64), logits.device)
        token_ids[rows] = _draw(logits[rows], [samplings[number] for number in part])
    return torch.where(is_finite, token_ids, -1)


def _ban(logits: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    banned = [
        (row, token_id)
        for row, sampling in enumerate(samplings)
        for token_id in sampling.banned_token_ids
    ]
    if banned:
        rows, token_ids = sent(np.array(banned, np.int64).T.copy(), logits.device)
        logits.index_put_((rows, token_ids), logits.new_full((), -torch.inf))


def _draw(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    vocab = logits.shape[1]
    settings = [
        (s.temperature, s.top_p, s.top_k or vocab, uniform(s.seed, s.index)) for s in samplings
    ]
    columns = sent(np.array(settings, np.float64).T.copy(), logits.device).unsqueeze(-1)
    temperature, top_p, top_k, point = columns.unbind()
    # fp64: the cumulative sum decides which token a uniform number hits.
    ordered, ids = torch.sort(logits.double() / temperature, descending=True, stable=True)
    probabilities = torch.softmax(ordered, -1)
    rank = torch.arange(vocab, device=logits.device)
    probabilities.masked_fill_(rank >= top_k, 0.0)
    before = torch.cumsum(probabilities, -1) - probabilities
    # A token stays if the mass before it is under top_p, so the first always stays.
    probabilities.masked_fill_(before >= top_p * probabilities.sum(-1, keepdim=True), 0.0)
    cumulative = torch.cumsum(probabilities, -1)
    place = torch.searchsorted(cumulative, point * cumulative[:, -1:], right=True)
    last = torch.where(probabilities > 0.0, rank, 0).amax(-1, keepdim=True)
    drawn: torch.Tensor = ids.gather(1, torch.minimum(place, last)).squeeze(1)
    return drawn
