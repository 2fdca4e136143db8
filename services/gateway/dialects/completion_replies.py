"""The responses of POST /v1/completions: whole texts and stream chunks. Pure."""

import codecs
import time
import uuid
from dataclasses import dataclass, field

from services.gateway.ask import Json
from services.gateway.dialects.chat_replies import finish_word
from services.gateway.dialects.completions import CompletionRequest, read
from services.gateway.dialects.dialect import Call, Dialect, Ending, Event, Opening
from services.gateway.dialects.usage_objects import StreamUsage, usage_object
from services.gateway.failures import HttpFailure, openai_error
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta, LikelyToken, TokenLogprob
from services.gateway.text.glm import Content

_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class _Place:
    """How many characters the tokens so far have come to."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def pass_by(self, token: TokenLogprob, *, names_control: bool) -> int:
        """Where the token's text begins; within a character, where that does.

        `names_control`: control tokens stand in the text by name, as in an echoed prompt.
        """
        before = self._num_characters
        data = token.data or (token.token.encode() if names_control else b"")
        self._num_characters += len(self._decoder.decode(data))
        return before


@dataclass
class _Choice:
    """What one choice has become so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: Json = field(default_factory=lambda: {name: [] for name in _LOGPROBS})
    place: _Place = field(default_factory=_Place)
    is_echoed: bool = False
    finish_word: str = ""


class CompletionReplies:
    """See Replies."""

    def __init__(self, model: str, request: CompletionRequest, num_choices: int) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._usage = StreamUsage(request.stream_options)
        self._has_logprobs = request.logprobs is not None
        self._has_echo = bool(request.echo)
        self._choices = [_Choice() for _ in range(num_choices)]
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def finish_words(self) -> list[str]:
        """See Replies."""
        return [choice.finish_word for choice in self._choices if choice.finish_word]

    def begin(self, opening: Opening) -> list[Event]:
        """Nothing."""
        self._usage.begin(opening.usage)
        return []

    def feed(self, choice: int, delta: Delta) -> list[Event]:
        """A chunk for the text; logprobs come with it, or alone."""
        self._usage.add(delta)
        state = self._choices[choice]
        text = "".join(part.text for part in delta.parts if isinstance(part, Content))
        is_prompt, state.is_echoed = self._has_echo and not state.is_echoed, True
        if not text and not delta.logprobs:
            return []
        state.texts.append(text)
        logprobs = _told(state.place, delta, is_prompt=is_prompt) if delta.logprobs else None
        for name, values in (logprobs or {}).items():
            state.logprobs[name] += values
        return [self._chunk(choice, text, logprobs)]

    def finish(self, choice: int, ending: Ending) -> list[Event]:
        """An empty text with the finish reason."""
        state = self._choices[choice]
        state.finish_word = finish_word(ending.reason)
        return [self._chunk(choice, "", None, state.finish_word)]

    def end(self, usage: Usage) -> list[Event]:
        """A chunk without choices, if usage was asked for."""
        if not self._usage.is_told:
            return []
        return [Event({**self._head, "choices": [], "usage": usage_object(usage)})]

    def fail(self, failure: HttpFailure) -> list[Event]:
        """The error object."""
        return [Event(openai_error(failure))]

    def whole(self, usage: Usage) -> Json:
        """See Replies."""
        choices = []
        for index, state in enumerate(self._choices):
            logprobs = state.logprobs if self._has_logprobs else None
            choices.append(_choice(index, "".join(state.texts), logprobs, state.finish_word))
        return {**self._head, "choices": choices, "usage": usage_object(usage)}

    def _chunk(
        self, choice: int, text: str, logprobs: Json | None, finish_reason: str | None = None
    ) -> Event:
        chunk = {**self._head, "choices": [_choice(choice, text, logprobs, finish_reason)]}
        return Event(self._usage.told_in(chunk))


def _told(place: _Place, delta: Delta, *, is_prompt: bool) -> Json:
    """The API's logprobs object for a choice's next tokens."""
    found = delta.logprobs
    tokens = [_spelled(each) for each in found]
    tops = [
        None
        if each.logprob is None
        else {**{_spelled(other): other.logprob for other in reversed(each.top)}, own: each.logprob}
        for own, each in zip(tokens, found, strict=True)
    ]
    values = (
        tokens,
        [each.logprob for each in found],
        tops,
        [place.pass_by(each, names_control=is_prompt) for each in found],
    )
    return dict(zip(_LOGPROBS, values, strict=True))


def _spelled(token: TokenLogprob | LikelyToken) -> str:
    """Part of a character by its bytes, as OpenAI does: by its text it would be as any other."""
    try:
        token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
    return token.token


def _choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _read(body: bytes) -> Call:
    request = read(body)
    ask = request.ask()
    num_choices = len(ask.prompts) * ask.num_choices
    return Call(ask, lambda model: CompletionReplies(model, request, num_choices))


COMPLETION = Dialect(
    operation="text_completion",
    read=_read,
    error=openai_error,
    last_words=b"data: [DONE]\n\n",
)
