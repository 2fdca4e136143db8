"""One attempt's tokens: how the next is drawn, and when the answer ends.

Pure; knows token ids, not KV. Counts start at the attempt's first token, which prefill draws.
"""

from shared import farspan_pb2 as pb
from shared.engine.step import Sampling


def longest_answer(sampling: pb.SamplingParams, num_prompt_tokens: int, max_position: int) -> int:
    """How many tokens the answer may have before it meets its own or the model's limit."""
    return min(sampling.max_new_tokens, max_position - num_prompt_tokens)


class Answer:
    """The tokens of one attempt. Used by one thread at a time."""

    def __init__(self, sampling: pb.SamplingParams, num_resumed: int, longest: int) -> None:
        self.num_tokens = 0
        self._sampling = sampling
        self._stop_token_ids = tuple(sampling.stop_token_ids)
        self._num_resumed = num_resumed
        self._longest = longest

    def add(self, token_id: int) -> pb.FinishReason | None:
        """Take the next token; why the answer ends with it, None if it goes on."""
        self.num_tokens += 1
        if token_id in self._stop_token_ids:
            return pb.FINISH_REASON_STOP
        if self.num_tokens >= self._longest:
            return pb.FINISH_REASON_LENGTH
        return None

    def next_sampling(self) -> Sampling:
        """How the next token is drawn."""
        may_stop = self.num_tokens >= self._sampling.min_new_tokens
        return Sampling(
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            seed=self._sampling.seed,
            index=self._num_resumed + self.num_tokens,
            banned_token_ids=() if may_stop else self._stop_token_ids,
        )
