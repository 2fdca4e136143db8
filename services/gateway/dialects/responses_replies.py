"""The responses of POST /v1/responses: whole answers, named events, and error objects. Pure."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.gateway.ask import Json
from services.gateway.dialects.dialect import Call, Dialect, Ending, Event, Opening
from services.gateway.dialects.responses import echoed, read
from services.gateway.dialects.sealed import seal
from services.gateway.dialects.text_logprobs import TextLogprobs
from services.gateway.failures import HttpFailure, openai_error
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta
from services.gateway.text.glm import Content, Part, Reasoning, ToolCall
from shared import farspan_pb2 as pb

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass
class _Item:
    """An output item as it grows."""

    kind: str  # reasoning, message or function_call
    id: str
    call: Json = field(default_factory=dict)  # a call's name and ids
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    is_whole: bool = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    def part(self) -> Json:
        """Its content so far."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }


class ResponsesReplies:
    """See Replies. There is one choice."""

    def __init__(
        self,
        model: str,
        echo: Json,
        namespaces: Mapping[str, tuple[str | None, str]],
        *,
        seals_reasoning: bool,
    ) -> None:
        """`namespaces` tells the namespace and name of the tools that the model knows."""
        self.id = f"resp_{uuid.uuid4().hex}"
        self._model = model
        self._echo = echo
        self._namespaces = namespaces
        self._seals_reasoning = seals_reasoning
        self._created = int(time.time())
        self._completed: int | None = None
        self._items: list[_Item] = []
        self._is_open = False
        self._logprobs = TextLogprobs()
        self._status = "in_progress"
        self._error: Json | None = None
        self._num_events = 0

    @property
    def finish_words(self) -> list[str]:
        """See Replies."""
        return [] if self._status == "in_progress" else [self._status]

    def begin(self, opening: Opening) -> list[Event]:
        """The response, empty."""
        return self._begin()

    def feed(self, choice: int, delta: Delta) -> list[Event]:
        """Items in turn: each kind of part opens its own, each call one more."""
        self._logprobs.take(delta.logprobs)
        return [event for part in delta.parts for event in self._add(part)]

    def finish(self, choice: int, ending: Ending) -> list[Event]:
        """The last item's end."""
        is_whole = ending.reason != pb.FINISH_REASON_LENGTH
        self._status = "completed" if is_whole else "incomplete"
        self._completed = int(time.time()) if is_whole else None
        return self._close(is_whole=is_whole)

    def end(self, usage: Usage) -> list[Event]:
        """The whole response."""
        return [self._event(f"response.{self._status}", response=self._response(usage))]

    def fail(self, failure: HttpFailure) -> list[Event]:
        """The error, and the response as far as it came."""
        events = [] if self._num_events else self._begin()
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        events.append(self._event("error", **told))
        self._status = "failed"
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        self._error = {"code": code, "message": failure.message}
        return [*events, self._event("response.failed", response=self._response(None))]

    def whole(self, usage: Usage) -> Json:
        """See Replies."""
        return self._response(usage)

    def _begin(self) -> list[Event]:
        return [
            self._event(name, response=self._response(None))
            for name in ("response.created", "response.in_progress")
        ]

    def _add(self, part: Part) -> list[Event]:
        match part:
            case Reasoning(text):
                events = self._opened("reasoning")
                told = self._event("response.reasoning_text.delta", **self._place(), delta=text)
            case Content(text):
                events = self._opened("message")
                logprobs = self._logprobs.give()
                self._items[-1].logprobs += logprobs
                told = self._event(
                    "response.output_text.delta", **self._place(), delta=text, logprobs=logprobs
                )
            case ToolCall(name, text):
                events = self._close(is_whole=True) + self._open(self._call(name))
                told = self._event(
                    "response.function_call_arguments.delta", **self._item_place(), delta=text
                )
        self._items[-1].texts.append(text)
        return [*events, told]

    def _opened(self, kind: str) -> list[Event]:
        """Events until an item of this kind is open."""
        if self._is_open and self._items[-1].kind == kind:
            return []
        return self._close(is_whole=True) + self._open(_Item(kind, _fresh_id(kind)))

    def _open(self, item: _Item) -> list[Event]:
        self._items.append(item)
        self._is_open = True
        added = self._event(
            "response.output_item.added",
            output_index=self._index,
            item=self._told(item, "in_progress"),
        )
        if item.kind == "function_call":
            return [added]
        return [
            added,
            self._event("response.content_part.added", **self._place(), part=item.part()),
        ]

    def _close(self, *, is_whole: bool) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item.is_whole = is_whole
        return [
            *self._done(item),
            self._event(
                "response.output_item.done", output_index=self._index, item=self._told(item)
            ),
        ]

    def _done(self, item: _Item) -> list[Event]:
        """The events that tell an item's text whole."""
        if item.kind == "function_call":
            name = "response.function_call_arguments.done"
            return [self._event(name, **self._item_place(), arguments=item.text)]
        told: Json = {"text": item.text}
        name = "response.reasoning_text.done"
        if item.kind == "message":
            name = "response.output_text.done"
            told["logprobs"] = list(item.logprobs)
        return [
            self._event(name, **self._place(), **told),
            self._event("response.content_part.done", **self._place(), part=item.part()),
        ]

    def _told(self, item: _Item, status: str = "") -> Json:
        """An item as clients see it; without a status, as it ended."""
        is_begun = status != "in_progress"
        head = {
            "id": item.id,
            "type": item.kind,
            "status": status or ("completed" if item.is_whole else "incomplete"),
        }
        if item.kind == "function_call":
            return {**head, **item.call, "arguments": item.text}
        content = [item.part()] if is_begun else []
        if item.kind == "message":
            return {**head, "role": "assistant", "content": content}
        sealed = seal(item.text) if self._seals_reasoning and is_begun else None
        return {**head, "summary": [], "content": content, "encrypted_content": sealed}

    def _call(self, joined: str) -> _Item:
        namespace, name = self._namespaces.get(joined, (None, joined))
        call: Json = {"call_id": f"call_{uuid.uuid4().hex}", "name": name}
        if namespace is not None:
            call["namespace"] = namespace
        return _Item("function_call", _fresh_id("function_call"), call)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _item_place(self) -> Json:
        return {"item_id": self._items[-1].id, "output_index": self._index}

    def _place(self) -> Json:
        return {**self._item_place(), "content_index": 0}

    def _response(self, usage: Usage | None) -> Json:
        is_cut = self._status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "output": [self._told(item) for item in self._items],
            "usage": None if usage is None else usage_object(usage),
            **self._echo,
        }

    def _event(self, name: str, **fields: object) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return Event({"type": name, "sequence_number": number, **fields}, name)


def usage_object(usage: Usage) -> Json:
    """The API's usage object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _fresh_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def _read(body: bytes) -> Call:
    request = read(body)
    echo = echoed(request)
    namespaces = {
        joined: (namespace, tool.name or "")
        for joined, (namespace, tool) in request.functions().items()
    }
    return Call(
        request.ask(),
        lambda model: ResponsesReplies(
            model, echo, namespaces, seals_reasoning=request.seals_reasoning
        ),
    )


RESPONSES = Dialect(
    operation="chat",
    read=_read,
    error=openai_error,
)
