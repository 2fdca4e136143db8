"""Logprobs as workers send them, unpacked: one entry a token. Pure."""

import math
from array import array
from typing import NamedTuple

from shared import farspan_pb2 as pb
from shared.errors import FarspanError


class RawLogprob(NamedTuple):
    """How likely one token was, and the likeliest ones at its place."""

    logprob: float | None  # None for a prompt's first token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), the likeliest first


def unpack(message: pb.TokenLogprobs, num_tokens: int) -> list[RawLogprob]:
    """One entry for each token. Raises FarspanError if there are not as many."""
    chosen, top_logprobs, top_ids = array("f"), array("f"), array("I")
    num_top = message.num_top
    try:
        chosen.frombytes(message.chosen)
        top_logprobs.frombytes(message.top_logprobs)
        top_ids.frombytes(message.top_token_ids)
    except ValueError:
        raise FarspanError("a worker's logprobs cannot be read") from None
    if (len(chosen), len(top_ids), len(top_logprobs)) != (
        num_tokens,
        num_tokens * num_top,
        num_tokens * num_top,
    ):
        raise FarspanError("a worker sent tokens without all of their logprobs")
    pairs = list(zip(top_ids, top_logprobs, strict=True))
    found = []
    for at, own in enumerate(chosen):
        top = pairs[at * num_top : (at + 1) * num_top]
        known = tuple(pair for pair in top if not math.isnan(pair[1]))
        found.append(RawLogprob(None if math.isnan(own) else own, known))
    return found
