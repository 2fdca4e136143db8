"""Logprobs as they travel: parts put together, and what a request may ask for.

Knows the message, not how its numbers are found.
"""

import math
import struct
from collections.abc import Sequence

from shared import farspan_pb2 as pb

_FLOAT_BYTES = 4


def joined(parts: Sequence[pb.TokenLogprobs]) -> pb.TokenLogprobs:
    """Those of the parts' tokens, in order; all tell as many of the likeliest."""
    return pb.TokenLogprobs(
        num_top=parts[0].num_top,
        chosen=b"".join(part.chosen for part in parts),
        top_token_ids=b"".join(part.top_token_ids for part in parts),
        top_logprobs=b"".join(part.top_logprobs for part in parts),
    )


def of_prompt(parts: Sequence[pb.TokenLogprobs], num_top: int, num_tokens: int) -> pb.TokenLogprobs:
    """Those of a prompt's tokens from those of its parts, which lack the first token: NaN there.

    The parts may go on behind the prompt.
    """
    told = joined([_nothing(num_top), *parts])
    num_listed = num_tokens * num_top * _FLOAT_BYTES
    return pb.TokenLogprobs(
        num_top=num_top,
        chosen=told.chosen[: num_tokens * _FLOAT_BYTES],
        top_token_ids=told.top_token_ids[:num_listed],
        top_logprobs=told.top_logprobs[:num_listed],
    )


def _nothing(num_top: int) -> pb.TokenLogprobs:
    nan = struct.pack("<f", math.nan)
    return pb.TokenLogprobs(
        num_top=num_top,
        chosen=nan,
        top_token_ids=bytes(num_top * _FLOAT_BYTES),
        top_logprobs=nan * num_top,
    )


def num_bytes(num_tokens: int, num_top: int) -> int:
    """What those of so many tokens take on the bus."""
    return num_tokens * _FLOAT_BYTES * (1 + 2 * num_top)
