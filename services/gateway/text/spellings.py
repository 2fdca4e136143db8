"""Keeps clients' words from becoming control tokens.

What spells an added token in a client's string is cut behind its first character by a mark, before
a template puts the string into a prompt; the tokenizer encodes what lies between marks piece by
piece. The mark is a lone surrogate: no JSON that is taken holds one, nor does any token.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import BadRequest, ConfigError

MARK = "\ud800"
_STRIDE = 1 << 18  # characters, searched in one go while other threads wait

# The assistant's own words may hold what it thinks and calls with, as they came out: templates look
# for that, and an answer that is sent again must have the tokens that it was generated with.
_OWN_WORDS = ("content", "reasoning_content")


class Spellings:
    """Of one tokenizer's added tokens; safe to use from several threads."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        """`definition` is tokenizer.json. Raises ConfigError for a token that cannot be cut."""
        added = definition.get("added_tokens", ())
        names = [token["content"] for token in added]
        for name in names:
            if len(name) < 2:
                raise ConfigError(f"added token {name!r} of tokenizer.json has no two characters")
        special = [token["content"] for token in added if token["special"]]
        self._every = _Marker(names)
        self._special = _Marker(special)
        self._any_case = _Marker(names, re.IGNORECASE)

    def marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> tuple[list[Any], Any, Any]:
        """A chat with marks in whatever spells a control token: messages, tools, options.

        Templates may change the case of options. Raises BadRequest for what is nested too deeply.
        """
        try:
            return (
                [self._message(message) for message in messages],
                self._every.value(tools),
                self._any_case.value(options),
            )
        except RecursionError:
            raise BadRequest("the chat is nested too deeply") from None

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        is_own = message.get("role") == "assistant"
        return {
            name: (self._special if is_own and name in _OWN_WORDS else self._every).content(value)
            for name, value in message.items()
        }


class _Marker:
    """Marks the spellings of some tokens."""

    def __init__(self, names: Sequence[str], flags: re.RegexFlag = re.NOFLAG) -> None:
        # A pattern with one first character is searched ten times as fast as one with several.
        self._patterns = [
            re.compile(
                re.escape(first)
                + "(?="
                + _any_of([name[1:] for name in names if name.startswith(first)])
                + ")",
                flags,
            )
            for first in sorted({name[0] for name in names})
        ]
        self._shortest = min(map(len, names), default=0)
        self._longest = max(map(len, names), default=0)
        self._beginnings = tuple(
            sorted({name[:length] for name in names for length in range(1, len(name))})
        )

    def value(self, value: Any) -> Any:
        """JSON data with marks in its strings, keys among them."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._text(name): self.value(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self.value(each) for each in value]
        return value

    def content(self, value: Any) -> Any:
        """The same; templates put the parts of a list side by side, where two may spell a token."""
        marked = self.value(value)
        if not isinstance(value, list):
            return marked
        return [self._part(part) for part in marked]

    def _part(self, part: Any) -> Any:
        if isinstance(part, str):
            return part + MARK if part.endswith(self._beginnings) else part
        if isinstance(part, dict) and "text" in part:
            return {**part, "text": self._part(part["text"])}
        return part

    def _text(self, text: str) -> str:
        if len(text) < self._shortest:
            return text
        for pattern in self._patterns:
            if self._is_in(pattern, text):
                strides = range(0, len(text), _STRIDE)
                text = "".join(self._stride(pattern, text, begin) for begin in strides)
        return text

    def _is_in(self, pattern: re.Pattern[str], text: str) -> bool:
        for begin in range(0, len(text), _STRIDE):
            if pattern.search(text, begin, begin + _STRIDE + self._longest):
                return True
        return False

    def _stride(self, pattern: re.Pattern[str], text: str, begin: int) -> str:
        """A part of the text, marked where a spelling begins in it."""
        end = begin + _STRIDE
        pieces = []
        for found in pattern.finditer(text, begin, end + self._longest):
            if found.start() < end:
                pieces.append(text[begin : found.end()])
                begin = found.end()
        return MARK.join([*pieces, text[begin:end]])


def _any_of(names: Sequence[str]) -> str:
    """A pattern of these texts that looks at each character once."""
    rests: dict[str, list[str]] = {}
    for name in names:
        if not name:
            return ""  # one is the beginning of the others: it is enough
        rests.setdefault(name[0], []).append(name[1:])
    found = [re.escape(first) + _any_of(rest) for first, rest in sorted(rests.items())]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
