"""Draws tokens on the device: the same rules as `shared.engine.sampler`, for a batch at once.

Nothing is read back: the host knows which rows are greedy before the step runs.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shared import farspan_pb2 as pb
from shared.engine.gpu.transfers import sent
from shared.engine.likeliest import likeliest, message
from shared.engine.sampler import least, uniform
from shared.engine.step import Bits, Sampling

_ROWS_AT_ONCE = 16  # sorting takes some 50 bytes a logit: 130 MB with GLM-5.3's vocabulary


class AskedLogprobs:
    """Those of the rows that ask for them; made before `draw` changes the logits."""

    def __init__(
        self,
        logits: torch.Tensor,  # [n, vocab] fp32
        samplings: Sequence[Sampling],
    ) -> None:
        # How many of the likeliest each row wants.
        self._wanted = {
            row: sampling.num_logprobs
            for row, sampling in enumerate(samplings)
            if sampling.num_logprobs is not None
        }
        self._num_rows = len(samplings)
        self._most = max(self._wanted.values(), default=0)
        if self._wanted:
            self._rows = sent(np.array(list(self._wanted), np.int64), logits.device)
            self._logits = logits[self._rows]

    def numbers(
        self,
        token_ids: torch.Tensor,  # [n] int64 drawn; where negative, nothing is
    ) -> torch.Tensor:  # [asking rows * (1 + 2 * most)] int64
        """What the host must be told."""
        if not self._wanted:
            return token_ids[:0]
        drawn = token_ids[self._rows].clamp_min(0)
        return likeliest(self._logits, drawn, self._most).numbers().flatten()

    def messages(self, numbers: npt.NDArray[np.int64]) -> list[pb.TokenLogprobs | None]:
        """Each row's, when the numbers are on the host; None where none are asked for."""
        messages: list[pb.TokenLogprobs | None] = [None] * self._num_rows
        told = numbers.reshape(-1, 1 + 2 * self._most)
        for place, (row, num_top) in enumerate(self._wanted.items()):
            messages[row] = message(told[place : place + 1], num_top)
        return messages


def draw(
    logits: torch.Tensor,  # [n, vocab] fp32, changed in place
    samplings: Sequence[Sampling],
) -> torch.Tensor:  # [n] int64 token ids; -1 where the logits are not finite
    """One token a row. Greedy ties go to the lower id."""
    _repeat(logits, samplings)
    _add(logits, samplings)
    _ban(logits, samplings)
    _allow(logits, samplings)
    is_finite = torch.isfinite(logits.amax(-1))
    token_ids = logits.argmax(-1)
    drawn = [number for number, each in enumerate(samplings) if each.temperature > 0.0]
    for first in range(0, len(drawn), _ROWS_AT_ONCE):
        part = drawn[first : first + _ROWS_AT_ONCE]
        rows = sent(np.array(part, np.int64), logits.device)
        token_ids[rows] = _draw(logits[rows], [samplings[number] for number in part])
    return torch.where(is_finite, token_ids, -1)


def _repeat(logits: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    rows, seen, penalties = [], [], []
    for row, sampling in enumerate(samplings):
        if sampling.shaping is not None and sampling.shaping.seen is not None:
            rows.append(row)
            seen.append(sampling.shaping.seen)
            penalties.append(sampling.shaping.repetition_penalty)
    if not rows:
        return
    places = sent(np.array(rows, np.int64), logits.device)
    penalty = sent(np.array(penalties, np.float32), logits.device).unsqueeze(1)
    asked = logits[places]
    repeated = torch.where(asked > 0, asked / penalty, asked * penalty)
    logits[places] = torch.where(_chosen(seen, logits), repeated, asked)


def _add(logits: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    rows, token_ids, additions = [], [], []
    for row, sampling in enumerate(samplings):
        shaping = sampling.shaping
        if shaping and shaping.added_token_ids is not None and shaping.additions is not None:
            rows.append(np.full(len(shaping.added_token_ids), row, np.int64))
            token_ids.append(shaping.added_token_ids)
            additions.append(shaping.additions)
    if rows:
        places = (
            sent(np.concatenate(rows), logits.device),
            sent(np.concatenate(token_ids), logits.device),
        )
        logits[places] = logits[places] + sent(np.concatenate(additions), logits.device)


def _allow(logits: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    rows, allowed = [], []
    for row, sampling in enumerate(samplings):
        if sampling.shaping is not None and sampling.shaping.allowed is not None:
            rows.append(row)
            allowed.append(sampling.shaping.allowed)
    if rows:
        places = sent(np.array(rows, np.int64), logits.device)
        logits[places] = logits[places].masked_fill(~_chosen(allowed, logits), -torch.inf)


def _chosen(bits: Sequence[Bits], logits: torch.Tensor) -> torch.Tensor:  # [n, vocab] bool
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    return (sent(np.stack(bits), logits.device)[:, token_ids >> 3] >> (token_ids & 7)) & 1 == 1


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
        (s.temperature, s.top_p, s.top_k or vocab, uniform(s.seed, s.index), least(s))
        for s in samplings
    ]
    columns = sent(np.array(settings, np.float64).T.copy(), logits.device).unsqueeze(-1)
    temperature, top_p, top_k, point, lowest = columns.unbind()
    # fp64: the cumulative sum decides which token a uniform number hits.
    ordered, ids = torch.sort(logits.double() / temperature, descending=True, stable=True)
    probabilities = torch.softmax(ordered, -1)
    rank = torch.arange(vocab, device=logits.device)
    probabilities.masked_fill_(rank >= top_k, 0.0)
    before = torch.cumsum(probabilities, -1) - probabilities
    # A token stays if the mass before it is under top_p, so the first always stays.
    probabilities.masked_fill_(before >= top_p * probabilities.sum(-1, keepdim=True), 0.0)
    probabilities.masked_fill_(ordered < ordered[:, :1] + lowest, 0.0)
    cumulative = torch.cumsum(probabilities, -1)
    place = torch.searchsorted(cumulative, point * cumulative[:, -1:], right=True)
    last = torch.where(probabilities > 0.0, rank, 0).amax(-1, keepdim=True)
    drawn: torch.Tensor = ids.gather(1, torch.minimum(place, last)).squeeze(1)
    return drawn
