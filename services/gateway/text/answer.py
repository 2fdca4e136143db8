"""An answer's text as it grows: token ids in, parts out.

Detokenise, cut at a stop string, split into parts: each stage holds back what is not certain, so
that the parts do not depend on how the tokens were batched. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.glm import Content, Parser, Part, Reasoning
from services.gateway.text.stops import StopScanner


@dataclass(frozen=True)
class LikelyToken:
    """A token and how likely the model held it."""

    token: str  # as a person reads it; control tokens by name
    data: bytes  # what it stands for in UTF-8 text, which may be part of a code point
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """One token of a text, with the likeliest ones at its place."""

    token: str
    data: bytes
    logprob: float | None  # None for a prompt's first token
    top: tuple[LikelyToken, ...] = ()


@dataclass(frozen=True)
class Delta:
    """What an answer has grown by: parts that are certain, logprobs of the tokens taken in."""

    parts: Sequence[Part]
    logprobs: Sequence[TokenLogprob] = ()


class Answer:
    """One answer's text stages, in order."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], parser: Parser) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._parser = parser
        self.num_tokens = 0  # that the text was made of

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found; later tokens change nothing."""
        return self._scanner.is_stopped

    def feed(self, token_ids: Sequence[int]) -> list[Part]:
        """The parts that are certain after these tokens; those after a stop do not count."""
        parts: list[Part] = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            parts += self._parser.feed(self._scanner.feed(self._detokenizer.feed([token_id])))
        return merge(parts)

    def flush(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        rest = self._scanner.feed(self._detokenizer.flush()) + self._scanner.flush()
        return merge([*self._parser.feed(rest), *self._parser.flush()])


def merge(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring texts of one kind as one part."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + part.text)
        else:
            merged.append(part)
    return merged
