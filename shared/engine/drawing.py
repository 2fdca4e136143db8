"""How the tokens of one answer are drawn: what was asked and what is written so far, to arrays.

Knows no logits: both samplers apply what is decided here. The same for a request's first token, on
prefill, and for the others, on decode; tokens of an attempt before count as answer.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared import farspan_pb2 as pb
from shared.engine.step import Bits, Sampling, Shaping
from shared.grammar import Constraint, Vocabulary

_FIRST_PLACES = 64


class Drawing:
    """The answer of one attempt. Used by one thread at a time."""

    def __init__(
        self,
        asked: pb.SamplingParams,
        token_ids: npt.NDArray[np.uint32],  # the prompt and, after a resume, the answer before
        num_resumed: int,
        vocabulary: Vocabulary,
    ) -> None:
        """Raises BadRequest for a grammar that cannot be used, or not with the answer before."""
        self.num_tokens = 0  # of this attempt
        self._asked = asked
        self._num_resumed = num_resumed
        self._size = vocabulary.size
        answer = token_ids[len(token_ids) - num_resumed :]
        self._seen = _held(token_ids, self._size) if _repeats(asked) else None
        self._added = _Added(asked, answer.tolist()) if _adds(asked) else None
        self._constraint: Constraint | None = None
        if asked.HasField("grammar"):
            self._constraint = vocabulary.constraint(asked.grammar.text, answer.tolist())

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended by its grammar, which a stop token completes."""
        return self._constraint is not None and self._constraint.is_over

    def take(self, token_id: int) -> None:
        """The answer goes on with this token. Raises BadRequest if its grammar forbids that."""
        self.num_tokens += 1
        if self._seen is not None:
            self._seen[token_id] = True
        if self._added is not None:
            self._added.count(token_id)
        if self._constraint is not None and token_id not in self._asked.stop_token_ids:
            self._constraint.accept(token_id)

    def next(self) -> Sampling:
        """How the next token is drawn. Raises BadRequest if the grammar allows none."""
        asked = self._asked
        may_stop = self.num_tokens >= asked.min_new_tokens
        unwanted = () if may_stop else tuple(asked.stop_token_ids)
        return Sampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=asked.seed,
            index=self._num_resumed + self.num_tokens,
            # A text whose grammar is complete ends, however short it is.
            banned_token_ids=unwanted if self._constraint is None else (),
            min_p=asked.min_p,
            shaping=self._shaping(unwanted),
            num_logprobs=asked.num_logprobs if asked.HasField("num_logprobs") else None,
        )

    def _shaping(self, unwanted: Sequence[int]) -> Shaping | None:
        allowed = self._allowed(unwanted)
        if self._seen is None and self._added is None and allowed is None:
            return None
        return Shaping(
            repetition_penalty=self._asked.repetition_penalty if self._seen is not None else 1.0,
            seen=None if self._seen is None else np.packbits(self._seen, bitorder="little"),
            added_token_ids=None if self._added is None else self._added.token_ids,
            additions=None if self._added is None else self._added.additions,
            allowed=allowed,
        )

    def _allowed(self, unwanted: Sequence[int]) -> Bits | None:
        if self._constraint is None:
            return None
        return np.frombuffer(self._constraint.mask(unwanted), np.uint8)


class _Added:
    """What is added to the logits of tokens that have a bias or were written: few of all."""

    def __init__(self, asked: pb.SamplingParams, answer: Sequence[int]) -> None:
        self._asked = asked
        self._place: dict[int, int] = {}  # of a token in the arrays
        self._token_ids = np.zeros(_FIRST_PLACES, np.int64)
        self._counts = np.zeros(_FIRST_PLACES, np.int64)
        self._bias = np.zeros(_FIRST_PLACES, np.float64)
        for token_id, bias in zip(asked.bias_token_ids, asked.biases, strict=True):
            place = self._place_of(token_id)  # may replace the arrays
            self._bias[place] = bias
        for token_id in answer:
            self.count(token_id)

    def count(self, token_id: int) -> None:
        """It was written once more."""
        place = self._place_of(token_id)
        self._counts[place] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Those that it concerns, as they are now."""
        return self._token_ids[: len(self._place)].copy()

    @property
    def additions(self) -> npt.NDArray[np.float32]:
        """To their logits."""
        counts = self._counts[: len(self._place)]
        added = self._bias[: len(self._place)] - self._asked.frequency_penalty * counts
        added -= self._asked.presence_penalty * (counts > 0)
        return added.astype(np.float32)

    def _place_of(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._bias = np.concatenate((self._bias, np.zeros_like(self._bias)))
        self._token_ids[place] = token_id
        return place


def _repeats(asked: pb.SamplingParams) -> bool:
    return asked.repetition_penalty not in (0.0, 1.0)


def _adds(asked: pb.SamplingParams) -> bool:
    penalties = (asked.presence_penalty, asked.frequency_penalty)
    return any(penalties) or bool(asked.bias_token_ids)


def _held(token_ids: npt.NDArray[np.uint32], size: int) -> npt.NDArray[np.bool_]:
    held = np.zeros(size, np.bool_)
    held[token_ids] = True
    return held
