"""Splits a GLM answer's text into reasoning, content and tool calls, however it is chunked.

Knows the model's markup, not the HTTP API. `</think>` ends the reasoning, and so does a tool call;
a call is `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>` and is given
out whole.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

THINK_END = "</think>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
KEY_START, KEY_END = "<arg_key>", "</arg_key>"
VALUE_START, VALUE_END = "<arg_value>", "</arg_value>"

# JSON type names a Python value answers to; bool before int, since a bool is an int.
_JSON_TYPES: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
    (type(None), frozenset({"null"})),
)


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

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""

    def flush(self) -> list[Part]:
        """What was held back, at the end of the answer."""


class PlainParser:
    """Everything is content: the completions API."""

    def feed(self, text: str) -> list[Part]:
        """The text as it came."""
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        """Nothing is ever held."""
        return []


class GlmParser:
    """The chat format's state machine: reasoning, content, and calls where tools were offered."""

    def __init__(self, schemas: Schemas, *, is_reasoning: bool) -> None:
        self._schemas = schemas
        self._is_reasoning = is_reasoning
        self._is_in_call = False
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The held text as it is; an unfinished call is shown as the text it was, never lost."""
        text, self._held = self._held, ""
        if self._is_in_call:
            text, self._is_in_call = CALL_START + text, False
        return [self._text(text)] if text else []

    def _advance(self, parts: list[Part]) -> bool:
        """Take one step over the held text; False when more text is needed."""
        return self._finish_call(parts) if self._is_in_call else self._find_marker(parts)

    def _finish_call(self, parts: list[Part]) -> bool:
        body, end, rest = self._held.partition(CALL_END)
        if not end:
            return False
        call = parse_call(body, self._schemas)
        parts.append(call or Content(CALL_START + body + CALL_END))
        self._held, self._is_in_call = rest, False
        return True

    def _find_marker(self, parts: list[Part]) -> bool:
        markers = self._markers()
        found = [(self._held.find(marker), marker) for marker in markers]
        start, marker = min((hit for hit in found if hit[0] >= 0), default=(-1, ""))
        if start < 0:
            keep = _held_len(self._held, markers)
            self._take(parts, len(self._held) - keep)
            return False
        self._take(parts, start)
        self._held = self._held[len(marker) :]
        self._is_reasoning = False
        self._is_in_call = marker == CALL_START
        return True

    def _markers(self) -> tuple[str, ...]:
        calls = (CALL_START,) if self._schemas else ()
        return (THINK_END, *calls) if self._is_reasoning else calls

    def _take(self, parts: list[Part], num_characters: int) -> None:
        if num_characters:
            parts.append(self._text(self._held[:num_characters]))
            self._held = self._held[num_characters:]

    def _text(self, text: str) -> Part:
        return Reasoning(text) if self._is_reasoning else Content(text)


def parse_call(body: str, schemas: Schemas) -> ToolCall | None:
    """The call between the tags, typed by its tool's schema; None if malformed or not offered."""
    name, has_arguments, rest = body.partition(KEY_START)
    schema = schemas.get(name.strip())
    if schema is None:
        return None
    arguments: dict[str, Any] = {}
    rest = has_arguments + rest
    while rest.strip():
        key, value, rest = _next_argument(rest)
        if key is None:
            return None
        arguments[key] = _typed(value, _types(schema, key))
    return ToolCall(name.strip(), json.dumps(arguments, ensure_ascii=False))


def _next_argument(text: str) -> tuple[str | None, str, str]:
    """(key, value, rest) of the first argument; the key is None when the markup is broken."""
    before, key_start, text = text.partition(KEY_START)
    key, key_end, text = text.partition(KEY_END)
    between, value_start, text = text.partition(VALUE_START)
    value, value_end, rest = text.partition(VALUE_END)
    is_whole = all((key_start, key_end, value_start, value_end))
    if not is_whole or before.strip() or between.strip():
        return None, "", ""
    return key.strip(), value, rest


def _types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types the schema allows for an argument; empty when it does not say."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    return _declared_types(declared)


def _declared_types(declared: Any) -> frozenset[str]:
    if not isinstance(declared, Mapping):
        return frozenset()
    kind = declared.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(item for item in kind if isinstance(item, str))
    choices = declared.get("anyOf") or declared.get("oneOf") or []
    found = [_declared_types(choice) for choice in choices] if isinstance(choices, list) else []
    return frozenset().union(*found)


def _typed(value: str, types: frozenset[str]) -> Any:
    """The value as JSON where the schema allows what it parses to; strings stand raw."""
    if types == {"string"}:
        return value
    try:
        parsed = json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return value
    for python_type, names in _JSON_TYPES:
        if isinstance(parsed, python_type):
            return parsed if not types or types & names else value
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _held_len(text: str, markers: tuple[str, ...]) -> int:
    """How many trailing characters may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
