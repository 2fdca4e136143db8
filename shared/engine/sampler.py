"""Logits to token ids, for both services.

Token i of an answer is drawn with one uniform number from a generator keyed by (seed, i): a resumed
or handed-over request continues exactly where it was, on any machine.

The order: repetition penalty, then what is added (frequency and presence penalties, bias), then
what must not be drawn, then temperature, top_k, top_p, min_p. Each means what it means in vLLM,
which adds the bias first and applies min_p before top_k; min_p last is transformers' order.
Logprobs are those of the logits before all this.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from shared import farspan_pb2 as pb
from shared.engine import likeliest
from shared.engine.step import Bits, Sampling, Shaping


def sample(
    logits: torch.Tensor,  # [n, vocab] fp32
    samplings: list[Sampling],
) -> list[int]:
    """One token id per row. Greedy ties go to the lower id."""
    return [_draw(row, sampling) for row, sampling in zip(logits, samplings, strict=True)]


def asked_logprobs(
    logits: torch.Tensor,  # [n, vocab] fp32
    token_ids: Sequence[int],
    samplings: Sequence[Sampling],
) -> list[pb.TokenLogprobs | None]:
    """Each row's own token's and its likeliest ones', where they are asked for."""
    return [
        None
        if sampling.num_logprobs is None
        else likeliest.of_rows(
            logits[row : row + 1], token_ids[row : row + 1], sampling.num_logprobs
        )
        for row, sampling in enumerate(samplings)
    ]


def _draw(logits: torch.Tensor, sampling: Sampling) -> int:
    if sampling.shaping is not None:
        logits = _shaped(logits, sampling.shaping)
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
    probabilities[ordered < ordered[0] + least(sampling)] = 0.0
    cumulative = torch.cumsum(probabilities, -1)
    point = uniform(sampling.seed, sampling.index) * float(cumulative[-1])
    place = int(
        torch.searchsorted(cumulative, torch.tensor(point, dtype=torch.float64), right=True)
    )
    last = int(torch.nonzero(probabilities)[-1])
    return int(ids[min(place, last)])


def _shaped(logits: torch.Tensor, shaping: Shaping) -> torch.Tensor:
    if shaping.seen is not None:
        # A tensor: a GPU divides by a plain number by multiplying with its inverse.
        penalty = torch.tensor(shaping.repetition_penalty, dtype=torch.float32)
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(_chosen(shaping.seen, len(logits)), repeated, logits)
    if shaping.added_token_ids is not None and shaping.additions is not None:
        logits = logits.clone()
        logits[torch.from_numpy(shaping.added_token_ids)] += torch.from_numpy(shaping.additions)
    if shaping.allowed is not None:
        logits = logits.masked_fill(~_chosen(shaping.allowed, len(logits)), -torch.inf)
    return logits


def _chosen(bits: Bits, size: int) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(bits, count=size, bitorder="little")).bool()


def least(sampling: Sampling) -> float:
    """How far a token's scaled logit may lie below the likeliest one's: min_p as a logarithm."""
    return math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) of token `index` under `seed`."""
    # uint64 by name: a list with a seed past 2**63 would go through float64 and lose its low bits.
    key = np.array([seed % 2**64, index], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    return float(generator.random())
