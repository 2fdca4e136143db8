"""The responses of POST /v1/completions: whole texts and stream chunks. Pure."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.ask import Json
from services.gateway.dialects.chat_replies import finish_word
from services.gateway.dialects.completions import CompletionRequest, read
from services.gateway.dialects.dialect import Call, Dialect, Ending, Event, Opening
from services.gateway.dialects.usage_objects import StreamUsage, usage_object
from services.gateway.failures import HttpFailure, openai_error
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta, TokenLogprob
from services.gateway.text.glm import Content


@dataclass
class _Choice:
    """What one choice has become so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_characters: int = 0  # of the tokens that have told their logprobs
    finish_word: str = ""


class CompletionReplies:
    """See Replies."""

    def __init__(self, model: str, request: CompletionRequest, num_choices: int) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._usage = StreamUsage(request.stream_options)
        self._has_logprobs = request.logprobs is not None
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
        if not text and not delta.logprobs:
            return []
        state.texts.append(text)
        logprobs = self._told(state, delta.logprobs) if delta.logprobs else None
        state.logprobs.extend(delta.logprobs)
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
            state.num_characters = 0
            logprobs = self._told(state, state.logprobs) if self._has_logprobs else None
            choices.append(_choice(index, "".join(state.texts), logprobs, state.finish_word))
        return {**self._head, "choices": choices, "usage": usage_object(usage)}

    def _told(self, state: _Choice, found: Sequence[TokenLogprob]) -> Json:
        """The API's logprobs object for the next tokens of a choice."""
        offsets = []
        for each in found:
            offsets.append(state.num_characters)
            state.num_characters += len(each.token)
        return {
            "tokens": [each.token for each in found],
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [
                None
                if each.logprob is None
                else {
                    **{other.token: other.logprob for other in reversed(each.top)},
                    each.token: each.logprob,
                }
                for each in found
            ],
            "text_offset": offsets,
        }

    def _chunk(
        self, choice: int, text: str, logprobs: Json | None, finish_reason: str | None = None
    ) -> Event:
        chunk = {**self._head, "choices": [_choice(choice, text, logprobs, finish_reason)]}
        return Event(self._usage.told_in(chunk))


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
