"""The responses of POST /v1/messages: whole answers, named events, and error objects. Pure."""

import json
import uuid
from dataclasses import dataclass, field

from services.gateway.ask import Json
from services.gateway.dialects.dialect import Call, Dialect, Ending, Event, Opening
from services.gateway.dialects.messages import MessagesRequest, read
from services.gateway.dialects.sealed import seal
from services.gateway.failures import TOO_LONG, HttpFailure
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta
from services.gateway.text.glm import Content, Part, Reasoning, ToolCall
from shared import farspan_pb2 as pb

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# This API has no code for it: clients know by these words that they must shorten something.
_TOO_LONG_WORDS = ("prompt is too long", "input length and `max_tokens` exceed context limit")


@dataclass
class _Block:
    """A content block as it grows."""

    kind: str  # thinking, text or tool_use
    texts: list[str] = field(default_factory=list)
    call: Json = field(default_factory=dict)  # a tool_use block's id and name


class MessagesReplies:
    """See Replies. There is one choice."""

    def __init__(self, model: str, *, hides_thinking: bool) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._hides_thinking = hides_thinking
        self._blocks: list[_Block] = []
        self._is_open = False
        self._stop_reason = ""
        self._stop_sequence: str | None = None

    @property
    def finish_words(self) -> list[str]:
        """See Replies."""
        return [self._stop_reason] if self._stop_reason else []

    def begin(self, opening: Opening) -> list[Event]:
        """The message, empty, with what its prompt cost."""
        return [_event("message_start", message=self._message([], opening.usage))]

    def feed(self, choice: int, delta: Delta) -> list[Event]:
        """Blocks in turn: each kind of part opens its own, each call one more."""
        return [event for part in delta.parts for event in self._add(part)]

    def finish(self, choice: int, ending: Ending) -> list[Event]:
        """The last block's end."""
        self._stop_reason = "end_turn"
        if ending.reason == pb.FINISH_REASON_LENGTH:
            self._stop_reason = "max_tokens"
        elif isinstance(ending.stop, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", ending.stop
        elif any(block.kind == "tool_use" for block in self._blocks):
            self._stop_reason = "tool_use"
        return self._close()

    def end(self, usage: Usage) -> list[Event]:
        """Why it ended and what it cost."""
        delta = {
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "stop_details": None,
        }
        return [
            _event("message_delta", delta=delta, usage=usage_object(usage)),
            _event("message_stop"),
        ]

    def fail(self, failure: HttpFailure) -> list[Event]:
        """The error object, as an event of its own."""
        return [Event(anthropic_error(failure), "error")]

    def whole(self, usage: Usage) -> Json:
        """See Replies."""
        return self._message([self._content(block) for block in self._blocks], usage)

    def _add(self, part: Part) -> list[Event]:
        told: Json | None
        match part:
            case Reasoning(text):
                events = self._opened("thinking")
                shown = "" if self._hides_thinking else text
                told = {"type": "thinking_delta", "thinking": shown} if shown else None
            case Content(text):
                events = self._opened("text")
                told = {"type": "text_delta", "text": text}
            case ToolCall(name, text):
                events = self._close()
                events += self._open(_Block("tool_use", call={"id": _call_id(), "name": name}))
                told = {"type": "input_json_delta", "partial_json": text}
        self._blocks[-1].texts.append(text)
        return events + ([self._delta(told)] if told else [])

    def _opened(self, kind: str) -> list[Event]:
        """Events until a block of this kind is open."""
        if self._is_open and self._blocks[-1].kind == kind:
            return []
        return self._close() + self._open(_Block(kind))

    def _open(self, block: _Block) -> list[Event]:
        self._blocks.append(block)
        self._is_open = True
        empty: dict[str, Json] = {
            "thinking": {"thinking": "", "signature": ""},
            "text": {"text": "", "citations": None},
            "tool_use": {**block.call, "input": {}},
        }
        told = {"type": block.kind, **empty[block.kind]}
        return [_event("content_block_start", index=self._index, content_block=told)]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        events = []
        if self._blocks[-1].kind == "thinking":
            signature = self._content(self._blocks[-1])["signature"]
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        return [*events, _event("content_block_stop", index=self._index)]

    def _delta(self, told: Json) -> Event:
        return _event("content_block_delta", index=self._index, delta=told)

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _content(self, block: _Block) -> Json:
        text = "".join(block.texts)
        if block.kind == "thinking":
            shown = "" if self._hides_thinking else text
            # A signature is opaque to clients; it carries only what they cannot see.
            signature = seal(text if self._hides_thinking else "")
            return {"type": "thinking", "thinking": shown, "signature": signature}
        if block.kind == "text":
            return {"type": "text", "text": text, "citations": None}
        return {"type": "tool_use", **block.call, "input": json.loads(text)}

    def _message(self, content: list[Json], usage: Usage) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._stop_reason or None,
            "stop_sequence": self._stop_sequence,
            "stop_details": None,
            "usage": usage_object(usage),
        }


def usage_object(usage: Usage) -> Json:
    """The API's usage object, whose input_tokens are those that no cache held."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def anthropic_error(failure: HttpFailure) -> Json:
    """The Anthropic error object."""
    kind = _ERROR_TYPES.get(
        failure.status, "api_error" if failure.status >= 500 else "invalid_request_error"
    )
    message = failure.message
    if failure.code == TOO_LONG and not any(words in message for words in _TOO_LONG_WORDS):
        message = f"{_TOO_LONG_WORDS[0]}: {message}"
    elif failure.param is not None and failure.param not in message:
        message = f"{failure.param}: {message}"  # this API has no other place for it
    error: Json = {"type": kind, "message": message}
    if failure.details is not None:
        error["details"] = failure.details
    return {"type": "error", "error": error}


def _event(name: str, **fields: object) -> Event:
    return Event({"type": name, **fields}, name)


def _call_id() -> str:
    return f"toolu_{uuid.uuid4().hex}"


def _read(body: bytes) -> Call:
    request: MessagesRequest = read(body)
    hides_thinking = request.hides_thinking
    return Call(request.ask(), lambda model: MessagesReplies(model, hides_thinking=hides_thinking))


MESSAGES = Dialect(
    operation="chat",
    read=_read,
    error=anthropic_error,
    keep_alive=b'event: ping\ndata: {"type":"ping"}\n\n',
)
