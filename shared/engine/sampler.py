"""Logits to token ids, for both services.

Token i of an answer is drawn with one uniform number from a generator keyed by (seed, i): a resumed
or handed-over request continues exactly where it was, on any machine.
"""

import numpy as np
import torch

from shared.engine.step import Sampling


def sample(
    logits: torch.Tensor,  # [n, vocab] fp32
    samplings: list[Sampling],
) -> list[int]:
    """One token id per row. Greedy ties go to the lower id."""
    return [_draw(row, sampling) for row, sampling in zip(logits, samplings, strict=True)]


def _draw(logits: torch.Tensor, sampling: Sampling) -> int:
    if sampling.banned_token_ids:
        logits = logits.clone()
        logits[list(sampling.banned_token_ids)] = -torch.inf
    if not torch.isfinite(logits.max()):
        raise FloatingPointError("the model's logits are not finite")
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    # fp64: the cumulative sum decides which token a uniform number hits.
    scaled = logits.double() / sampling.temperature
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    probabilities = torch.softmax(ordered, -1)
    if sampling.top_k:
        probabilities[sampling.top_k :] = 0.0
    before = torch.cumsum(probabilities, -1) - probabilities
    # A token stays if the mass before it is under top_p, so the first always stays.
    probabilities[before >= sampling.top_p * float(probabilities.sum())] = 0.0
    cumulative = torch.cumsum(probabilities, -1)
    point = uniform(sampling.seed, sampling.index) * float(cumulative[-1])
    place = int(
        torch.searchsorted(cumulative, torch.tensor(point, dtype=torch.float64), right=True)
    )
    last = int(torch.nonzero(probabilities)[-1])
    return int(ids[min(place, last)])


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) of token `index` under `seed`."""
    # uint64 by name: a list with a seed past 2**63 would go through float64 and lose its low bits.
    key = np.array([seed % 2**64, index], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    return float(generator.random())
