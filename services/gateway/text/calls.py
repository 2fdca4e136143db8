"""The markup of one tool call in a GLM answer: whether text may be one, and what it says.

A call is `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, or the same
with newlines around name, keys and values; there may be no arguments.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from services.gateway.text.schema_types import SchemaTypes, typed

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
KEY_START, KEY_END = "<arg_key>", "</arg_key>"
VALUE_START, VALUE_END = "<arg_value>", "</arg_value>"
_ARGUMENT = re.compile(
    rf"\s*{KEY_START}(?P<key>(?:(?!{KEY_END}).)*){KEY_END}"
    rf"\s*{VALUE_START}(?P<value>.*?){VALUE_END}",
    re.DOTALL,
)


class CallText:
    """The text behind a call's first marker as it grows; looks at each piece once."""

    def __init__(self, text: str) -> None:
        self._pieces = [text]
        self._tail = text
        self._is_named = False
        self.is_whole = CALL_END in text

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Take in what came."""
        self._pieces.append(text)
        window = self._tail + text
        self.is_whole = self.is_whole or CALL_END in window
        self._tail = window[1 - len(CALL_END) :]

    def may_name(self, names: Collection[str]) -> bool:
        """Whether this begins, or may yet begin, with an offered tool's name."""
        if self._is_named:
            return True
        given, bracket, rest = self.text.lstrip().partition("<")
        name, marker = given.rstrip(), bracket + rest
        if not marker:
            may_grow = name == given and any(each.startswith(name) for each in names)
            return may_grow or name in names
        self._is_named = marker.startswith((KEY_START, CALL_END))
        may_be_marked = KEY_START.startswith(marker) or CALL_END.startswith(marker)
        return name in names and (self._is_named or may_be_marked)


def read_call(body: str, tools: Mapping[str, SchemaTypes]) -> tuple[str, str] | None:
    """Name and arguments (a JSON object as text) of the call between its markers.

    None if it is malformed or its tool was not offered.
    """
    name = body.partition(KEY_START)[0]
    types = tools.get(name.strip())
    if types is None:
        return None
    arguments: dict[str, Any] = {}
    place = len(name)
    while found := _ARGUMENT.match(body, place):
        key, value = found["key"].strip(), found["value"]
        if not key:
            return None
        arguments[key] = typed(value, types.of_argument(key))
        place = found.end()
    if body[place:].strip():
        return None
    return name.strip(), json.dumps(arguments, ensure_ascii=False)
