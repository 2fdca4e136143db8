"""The responses of POST /v1/chat/completions: whole answers and stream chunks. Pure."""

import time
import uuid
from dataclasses import dataclass, field

from services.gateway.ask import Json
from services.gateway.dialects.chat import ChatRequest, read
from services.gateway.dialects.dialect import Call, Dialect, Ending, Event, Opening
from services.gateway.dialects.usage_objects import StreamUsage, chat_logprob, usage_object
from services.gateway.failures import HttpFailure, openai_error
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta
from services.gateway.text.glm import Content, Part, Reasoning, ToolCall
from shared import farspan_pb2 as pb


@dataclass
class _Choice:
    """What one choice has become so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    is_begun: bool = False
    finish_word: str = ""

    def add(self, part: Part) -> Json:
        """Take a part in; the delta that tells it."""
        match part:
            case Reasoning(text):
                self.reasoning.append(text)
                return {"reasoning_content": text}
            case Content(text):
                self.content.append(text)
                return {"content": text}
            case ToolCall(name, arguments):
                call = {
                    "index": len(self.tool_calls),
                    "id": f"call_{uuid.uuid4().hex}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                self.tool_calls.append(call)
                return {"tool_calls": [call]}

    def message(self) -> Json:
        """The whole, with the fields that have something in them."""
        content = "".join(self.content)
        message: Json = {
            "role": "assistant",
            "content": content or None if self.tool_calls else content,
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"}
                for call in self.tool_calls
            ]
        return message


class ChatReplies:
    """See Replies."""

    def __init__(self, model: str, request: ChatRequest) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._usage = StreamUsage(request.stream_options)
        self._has_logprobs = bool(request.logprobs)
        self._choices = [_Choice() for _ in range(request.n or 1)]
        self._head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def finish_words(self) -> list[str]:
        """See Replies."""
        return [choice.finish_word for choice in self._choices if choice.finish_word]

    def begin(self, opening: Opening) -> list[Event]:
        """Nothing: the first chunk of each choice carries the role."""
        self._usage.begin(opening.usage)
        return []

    def feed(self, choice: int, delta: Delta) -> list[Event]:
        """A chunk for each part; logprobs come with the first, or alone."""
        self._usage.add(delta)
        state = self._choices[choice]
        logprobs = [chat_logprob(found) for found in delta.logprobs]
        state.logprobs.extend(logprobs)
        deltas = [state.add(part) for part in delta.parts] or ([{}] if logprobs else [])
        events = []
        for place, told in enumerate(deltas):
            events.append(self._chunk(choice, told, logprobs if place == 0 else []))
        return events

    def finish(self, choice: int, ending: Ending) -> list[Event]:
        """The chunk with the finish reason; the role too, if the answer was empty."""
        state = self._choices[choice]
        word = finish_word(ending.reason)
        state.finish_word = "tool_calls" if state.tool_calls and word == "stop" else word
        return [self._chunk(choice, {}, [], state.finish_word)]

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
        choices = [
            {
                "index": index,
                "message": state.message(),
                "logprobs": {"content": state.logprobs} if self._has_logprobs else None,
                "finish_reason": state.finish_word,
            }
            for index, state in enumerate(self._choices)
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_object(usage),
        }

    def _chunk(
        self, choice: int, delta: Json, logprobs: list[Json], finish_reason: str | None = None
    ) -> Event:
        state = self._choices[choice]
        if not state.is_begun:
            state.is_begun = True
            delta = {"role": "assistant", **delta}
        told = {
            "index": choice,
            "delta": delta,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head, "choices": [told]}
        return Event(self._usage.told_in(chunk))


def finish_word(reason: pb.FinishReason) -> str:
    """OpenAI's word for why an answer ended."""
    return "length" if reason == pb.FINISH_REASON_LENGTH else "stop"


def _read(body: bytes) -> Call:
    request = read(body)
    return Call(request.ask(), lambda model: ChatReplies(model, request))


CHAT = Dialect(
    operation="chat",
    read=_read,
    error=openai_error,
    last_words=b"data: [DONE]\n\n",
)
