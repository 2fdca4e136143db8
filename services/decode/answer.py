"""One attempt's tokens: when the answer ends.

Pure; knows token ids, not KV. Counts start at the attempt's first token, which prefill draws.
"""

from collections.abc import Sequence

from shared import farspan_pb2 as pb
from shared.engine.drawing import Drawing
from shared.engine.step import Sampling


def longest_answer(sampling: pb.SamplingParams, num_prompt_tokens: int, max_position: int) -> int:
    """How many tokens the answer may have before it meets its own or the model's limit."""
    return min(sampling.max_new_tokens, max_position - num_prompt_tokens)


class Answer:
    """The tokens of one attempt. Used by one thread at a time."""

    def __init__(self, drawing: Drawing, stop_token_ids: Sequence[int], longest: int) -> None:
        self._drawing = drawing
        self._stop_token_ids = frozenset(stop_token_ids)
        self._longest = longest

    @property
    def num_tokens(self) -> int:
        """Of this attempt."""
        return self._drawing.num_tokens

    def add(self, token_id: int) -> pb.FinishReason | None:
        """Take the next token; why the answer ends with it, None if it goes on.

        Raises BadRequest if its grammar forbids the token.
        """
        self._drawing.take(token_id)
        if token_id in self._stop_token_ids or self._drawing.is_over:
            return pb.FINISH_REASON_STOP
        if self.num_tokens >= self._longest:
            return pb.FINISH_REASON_LENGTH
        return None

    def next_sampling(self) -> Sampling:
        """How the next token is drawn. Raises BadRequest if its grammar allows none."""
        return self._drawing.next()
