"""What may be asked of a worker's sampler: checked at the door of both kinds, trusted inside."""

import math
from collections.abc import Iterator

from shared import farspan_pb2 as pb
from shared import logprobs
from shared.errors import BadRequest

MAX_LOGPROBS = 20  # likeliest tokens told for each token
MAX_PROMPT_LOGPROBS_BYTES = 16 << 20  # they travel in one message
_LARGEST = 1e6  # of a penalty or a bias: nobody means more, and sums of them stay finite


def check(asked: pb.SamplingParams, vocab_size: int) -> None:
    """Raises BadRequest for what cannot be drawn so."""
    for is_wrong, reason in _faults(asked, vocab_size):
        if is_wrong:
            raise BadRequest(reason)


def check_prompt_logprobs(asked: pb.SamplingParams, num_prompt_tokens: int) -> None:
    """Raises BadRequest if the prompt's logprobs are too much for one message."""
    if not asked.HasField("num_prompt_logprobs"):
        return
    num_bytes = logprobs.num_bytes(num_prompt_tokens, asked.num_prompt_logprobs)
    if num_bytes > MAX_PROMPT_LOGPROBS_BYTES:
        raise BadRequest(
            f"logprobs of {num_prompt_tokens} prompt tokens take {num_bytes} bytes,"
            f" at most {MAX_PROMPT_LOGPROBS_BYTES} can be told"
        )


def _faults(asked: pb.SamplingParams, vocab_size: int) -> Iterator[tuple[bool, str]]:
    yield asked.max_new_tokens < 1, "max_new_tokens must be at least 1"
    yield (
        not (math.isfinite(asked.temperature) and asked.temperature >= 0),
        "the temperature must be a number of at least 0",
    )
    yield not 0 < asked.top_p <= 1, "top_p must be in (0, 1]"
    yield not 0 <= asked.min_p <= 1, "min_p must be in [0, 1]"
    penalties = (asked.presence_penalty, asked.frequency_penalty, *asked.biases)
    yield any(not abs(value) <= _LARGEST for value in penalties), "a penalty or bias is too large"
    yield not 0 <= asked.repetition_penalty <= _LARGEST, "repetition_penalty must be above 0"
    named = [*asked.stop_token_ids, *asked.bias_token_ids]
    yield any(token_id >= vocab_size for token_id in named), "a token is outside the vocabulary"
    num_biased = len(set(asked.bias_token_ids))
    yield (
        not num_biased == len(asked.bias_token_ids) == len(asked.biases),
        "each biased token needs one bias",
    )
    most = min(MAX_LOGPROBS, vocab_size)
    asks = max(asked.num_logprobs, asked.num_prompt_logprobs)
    yield asks > most, f"logprobs of at most {most} tokens can be told"
    has_grammar = asked.HasField("grammar")
    yield has_grammar and asked.grammar.kind != pb.GRAMMAR_KIND_LARK, "a grammar of unknown kind"
