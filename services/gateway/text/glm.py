"""Splits a GLM answer's text into reasoning, content and tool calls, however it is chunked.

Knows the model's markup, not the HTTP API. A call is given out whole. It ends at the first
`</tool_call>`, so an argument cannot hold that text, nor `</arg_value>`. What is not a call of an
offered tool is the text that it was.

`</think>` ends the reasoning, and so does a call. `<think>` at an answer's beginning starts it.
White space is the model's and stays, also behind `</think>`, but for what only separates: a blank
run between markers and a call, or behind the last call, and blanks before a leading `<think>`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.text.calls import CALL_END, CALL_START, CallText, read_call
from services.gateway.text.schema_types import SchemaTypes

THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Reasoning:
    """Text before the end of thinking."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text of the answer proper."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """One complete call; arguments is a JSON object as text."""

    name: str
    arguments: str


Part = Reasoning | Content | ToolCall
Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schema of its parameters


class Parser(Protocol):
    """Turns text into parts; the concatenation of equal parts does not depend on chunking."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer ends here, whatever else comes."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""

    def flush(self) -> list[Part]:
        """What was held back, at the end of the answer."""


class PlainParser:
    """Everything is content: the completions API."""

    is_reasoning = False
    is_complete = False

    def feed(self, text: str) -> list[Part]:
        """The text as it came."""
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        """Nothing is ever held."""
        return []


class GlmParser:
    """The chat format's state machine: reasoning, content, and calls where tools were offered."""

    def __init__(
        self, schemas: Schemas, *, is_reasoning: bool, max_calls: int | None = None
    ) -> None:
        """`is_reasoning`: the prompt ends within `<think>`. `max_calls`: None = any number."""
        self.is_reasoning = is_reasoning
        self._tools = {name: SchemaTypes(schema) for name, schema in schemas.items()}
        self._calls_left = max_calls
        self._is_first = True  # no text was given out yet, so <think> may still come
        self._held = ""
        self._num_plain = 0  # leading characters of held in which no call starts
        self._blank = ""  # white space that is left out if a call follows
        self._follows_marker = not is_reasoning  # text so far, since a marker, is blank
        self._follows_call = False
        self._call: CallText | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer has all the calls it may have; later text is left out."""
        return self._calls_left == 0

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        if self.is_complete:
            return []
        if self._is_plain and "<" not in text:  # nearly every token: a quarter of the time
            return [self._text(text)] if text else []
        if self._call is not None:
            self._call.add(text)
        else:
            self._held += text
        parts: list[Part] = []
        while not self.is_complete and self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The held text as it is; an unfinished call is shown as the text it was, never lost."""
        parts: list[Part] = []
        if self.is_complete:
            return parts
        self._is_first = False
        if self._call is not None:
            self._give_up_call(parts, len(self._call.text))
        while self._find_marker(parts):
            pass
        self._take(parts, len(self._held))
        if self._blank and not self._follows_call:
            parts.append(self._text(self._blank))
        return parts

    @property
    def _is_plain(self) -> bool:
        """Whether text without a marker's beginning goes out as it comes."""
        is_waiting = self._is_first or self._follows_marker or self._call is not None
        return not (is_waiting or self._held)

    def _advance(self, parts: list[Part]) -> bool:
        """Take one step over the held text; False when more text is needed."""
        if self._call is not None:
            return self._finish_call(self._call, parts)
        if self._is_first:
            return self._begin()
        return self._find_marker(parts)

    def _begin(self) -> bool:
        """Pass over a leading <think>; False while it may still come."""
        text = self._held.lstrip()
        if THINK_START.startswith(text):
            return False
        self._is_first = False
        if text.startswith(THINK_START):
            self._held = text[len(THINK_START) :]
            self.is_reasoning = True
        return True

    def _find_marker(self, parts: list[Part]) -> bool:
        start, marker = self._first_marker()
        if not marker:
            self._take(parts, len(self._held) - _held_len(self._held, self._markers()))
            return False
        self._take(parts, start)
        self._drop(len(marker))
        if marker == CALL_START:
            self._call, self._held = CallText(self._held), ""
        else:
            self.is_reasoning, self._follows_marker, self._follows_call = False, True, False
        return True

    def _first_marker(self) -> tuple[int, str]:
        found = [
            (self._held.find(marker, self._num_plain if marker == CALL_START else 0), marker)
            for marker in self._markers()
        ]
        return min((hit for hit in found if hit[0] >= 0), default=(-1, ""))

    def _markers(self) -> tuple[str, ...]:
        calls = (CALL_START,) if self._tools else ()
        return (THINK_END, *calls) if self.is_reasoning else calls

    def _finish_call(self, call: CallText, parts: list[Part]) -> bool:
        if not call.may_name(self._tools):
            self._give_up_call(parts, 0)
            return True
        if not call.is_whole:
            return False
        body, _, rest = call.text.partition(CALL_END)
        found = read_call(body, self._tools)
        if found is None:
            # The same end may still be another call's, which begins within what was none.
            last_start = body.rfind(CALL_START)
            self._give_up_call(parts, last_start if last_start >= 0 else len(body))
            return True
        parts.append(ToolCall(*found))
        self._call, self._held, self._num_plain = None, rest, 0
        self.is_reasoning, self._blank = False, ""
        self._follows_marker = self._follows_call = True
        if self._calls_left is not None:
            self._calls_left -= 1
        return True

    def _give_up_call(self, parts: list[Part], num_plain: int) -> None:
        """The marker was text; no call starts in the first characters behind it."""
        assert self._call is not None
        self._held, self._num_plain, self._call = self._call.text, num_plain, None
        self._give(parts, CALL_START)

    def _take(self, parts: list[Part], num_characters: int) -> None:
        if num_characters:
            text = self._held[:num_characters]
            self._drop(num_characters)
            self._give(parts, text)

    def _drop(self, num_characters: int) -> None:
        self._held = self._held[num_characters:]
        self._num_plain = max(0, self._num_plain - num_characters)

    def _give(self, parts: list[Part], text: str) -> None:
        """Text for the client; blank text right behind a marker waits for what follows."""
        if self._follows_marker and self._tools and not text.strip():
            self._blank += text
            return
        parts.append(self._text(self._blank + text))
        self._blank, self._follows_marker, self._follows_call = "", False, False

    def _text(self, text: str) -> Part:
        return Reasoning(text) if self.is_reasoning else Content(text)


def _held_len(text: str, markers: tuple[str, ...]) -> int:
    """How many trailing characters may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    start = text.rfind("<", max(0, len(text) - longest))
    if start < 0:
        return 0
    return len(text) - start if any(marker.startswith(text[start:]) for marker in markers) else 0
