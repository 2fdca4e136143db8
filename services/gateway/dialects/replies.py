"""The public API's response shapes: whole answers and stream chunks of both endpoints.

Pure: parts of an answer in, JSON-ready dictionaries out.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.generation import Usage
from services.gateway.text.glm import Content, Part, Reasoning, ToolCall
from shared import farspan_pb2 as pb

Json = dict[str, Any]


class Replies(Protocol):
    """One answer's responses; the order of calls is the order of the stream."""

    @property
    def id(self) -> str:
        """The response's id."""

    def chunks(self, parts: Sequence[Part]) -> list[Json]:
        """Stream chunks for parts of the answer, in order."""

    def finish(self, reason: pb.FinishReason) -> list[Json]:
        """The chunks that end the choice."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that asked for usage."""

    def whole(self, reason: pb.FinishReason, usage: Usage) -> Json:
        """The response without streaming, of all parts given to `chunks`."""

    @property
    def finish_word(self) -> str:
        """The finish reason as it was told."""


def usage_object(usage: Usage) -> Json:
    """The API's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass
class ChatReplies:
    """Responses of POST /v1/chat/completions."""

    model: str
    shows_usage: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    finish_word: str = ""
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _tool_calls: list[Json] = field(default_factory=list)
    _is_begun: bool = False

    def chunks(self, parts: Sequence[Part]) -> list[Json]:
        """A chunk for each part; the first one carries the role."""
        return [self._chunk(self._delta(part)) for part in parts]

    def finish(self, reason: pb.FinishReason) -> list[Json]:
        """The chunk with the finish reason; the role too, if the answer was empty."""
        self._name_reason(reason)
        return [self._chunk({}, self.finish_word)]

    def usage_chunk(self, usage: Usage) -> Json:
        """A chunk without choices."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_object(usage)}

    def whole(self, reason: pb.FinishReason, usage: Usage) -> Json:
        """The message, with the fields that have something in them."""
        self._name_reason(reason)
        content = "".join(self._content)
        message: Json = {
            "role": "assistant",
            "content": content or None if self._tool_calls else content,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._tool_calls:
            message["tool_calls"] = [_without_index(call) for call in self._tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self.finish_word,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage_object(usage)}

    def _delta(self, part: Part) -> Json:
        match part:
            case Reasoning(text):
                self._reasoning.append(text)
                return {"reasoning_content": text}
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case ToolCall(name, arguments):
                call = {
                    "index": len(self._tool_calls),
                    "id": f"call_{uuid.uuid4().hex}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                self._tool_calls.append(call)
                return {"tool_calls": [call]}

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        if not self._is_begun:
            self._is_begun = True
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.shows_usage else chunk

    def _name_reason(self, reason: pb.FinishReason) -> None:
        word = _finish_word(reason)
        self.finish_word = "tool_calls" if self._tool_calls and word == "stop" else word

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass
class CompletionReplies:
    """Responses of POST /v1/completions."""

    model: str
    shows_usage: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    finish_word: str = ""
    _texts: list[str] = field(default_factory=list)

    def chunks(self, parts: Sequence[Part]) -> list[Json]:
        """A chunk for each piece of text."""
        texts = [part.text for part in parts if isinstance(part, Content)]
        self._texts.extend(texts)
        return [self._chunk(text) for text in texts]

    def finish(self, reason: pb.FinishReason) -> list[Json]:
        """An empty text with the finish reason."""
        self.finish_word = _finish_word(reason)
        return [self._chunk("", self.finish_word)]

    def usage_chunk(self, usage: Usage) -> Json:
        """A chunk without choices."""
        return {**self._head(), "choices": [], "usage": usage_object(usage)}

    def whole(self, reason: pb.FinishReason, usage: Usage) -> Json:
        """The text."""
        self.finish_word = _finish_word(reason)
        choices = [_choice("".join(self._texts), self.finish_word)]
        return {**self._head(), "choices": choices, "usage": usage_object(usage)}

    def _chunk(self, text: str, finish_reason: str | None = None) -> Json:
        chunk = {**self._head(), "choices": [_choice(text, finish_reason)]}
        return {**chunk, "usage": None} if self.shows_usage else chunk

    def _head(self) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }


def _choice(text: str, finish_reason: str | None) -> Json:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _finish_word(reason: pb.FinishReason) -> str:
    return "length" if reason == pb.FINISH_REASON_LENGTH else "stop"


def _without_index(call: Json) -> Json:
    return {name: value for name, value in call.items() if name != "index"}
