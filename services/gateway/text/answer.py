"""An answer's text as it grows: token ids in, parts out.

Detokenise, cut at a stop string, split into parts: each stage holds back what is not certain, so
that the parts do not depend on how the tokens were batched. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.logprobs import RawLogprob
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


Describe = Callable[[int], tuple[str, bytes]]  # a token's text for people, and its bytes


@dataclass(frozen=True)
class Delta:
    """What an answer has grown by: parts that are certain, logprobs of the tokens taken in."""

    parts: Sequence[Part]
    logprobs: Sequence[TokenLogprob] = ()
    num_tokens: int = 0  # taken in
    num_reasoning_tokens: int = 0  # of them


@dataclass(frozen=True)
class Stops:
    """What of the client's ends an answer before its workers do."""

    texts: Sequence[str] = ()  # looked for after the reasoning: clients do not mean what they skip
    token_ids: frozenset[int] = frozenset()  # their text is not shown; workers end with them too
    min_tokens: int = 0  # texts that end within the first so many tokens do not count


class Answer:
    """One answer's text stages, in order."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Stops, parser: Parser, describe: Describe
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._scanner = StopScanner(stops.texts)
        self._parser = parser
        self._describe = describe
        self._is_ended = False
        self.num_tokens = 0  # that the text was made of
        self.num_reasoning_tokens = 0
        self.stop: str | int | None = None  # the client's stop that has ended it

    @property
    def is_stopped(self) -> bool:
        """Whether it has ended by what its text says; later tokens change nothing."""
        return self._is_ended

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[RawLogprob] = ()) -> Delta:
        """What is certain after these tokens; those after a stop do not count."""
        parts: list[Part] = []
        told: list[TokenLogprob] = []
        before, reasoning_before = self.num_tokens, self.num_reasoning_tokens
        for place, token_id in enumerate(token_ids):
            if self._is_ended:
                break
            parts += self._take(token_id)
            if logprobs:
                told.append(self.described(token_id, logprobs[place]))
        return Delta(
            merge(parts) if len(parts) > 1 else parts,
            told,
            self.num_tokens - before,
            self.num_reasoning_tokens - reasoning_before,
        )

    def flush(self) -> Delta:
        """What was held back, at the end of the answer."""
        rest = self._scanner.feed(self._detokenizer.flush()) + self._scanner.flush()
        return Delta(merge([*self._parser.feed(rest), *self._parser.flush()]))

    def described(self, token_id: int, raw: RawLogprob) -> TokenLogprob:
        """A token's logprob with texts for the ids."""
        describe = self._describe
        top = tuple(LikelyToken(*describe(other), logprob) for other, logprob in raw.top)
        return TokenLogprob(*describe(token_id), raw.logprob, top)

    def _take(self, token_id: int) -> list[Part]:
        self.num_tokens += 1
        self.num_reasoning_tokens += self._parser.is_reasoning
        if token_id in self._stops.token_ids:
            self._is_ended, self.stop = True, token_id
            return []
        text = self._detokenizer.feed(token_id)
        if self.num_tokens > self._stops.min_tokens and not self._parser.is_reasoning:
            text = self._scanner.feed(text)
            if self._scanner.stopped_by is not None:
                self._is_ended, self.stop = True, self._scanner.stopped_by
        parts = self._parser.feed(text)
        if self._parser.is_complete:
            self._is_ended = True
        return parts


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
