"""Which raw texts a tool's argument may be, where its schema allows strings: as part of a grammar.

Pure. In GLM's markup a string stands raw, so JSON's own grammar cannot bind it. Bound are choices
(enum, const), patterns, lengths and the formats below, through references, allOf, anyOf and oneOf.
What may also be a number, an object or an array is any text, unless all of it are choices.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.text.calls import VALUE_END
from services.gateway.text.schema_types import Types, declared, json_types, listed, referred

# Any text; one of these; or an expression of llguidance's Lark.
Texts = None | tuple[str, ...] | str

_MAX_DEPTH = 32  # references and choices within one another; what lies deeper is any text
_MAX_PARTS = 1024  # looked through for one argument; beyond them it is any text
_MAX_LENGTH = 10_000  # a state of the automaton for each character; longer ones are not bound
_MAX_FREE_LENGTH = 20  # the same of a minimum alone, beside the marker that the text may not hold
_FEW = frozenset({"string", "null", "boolean"})
_FULL_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_FULL_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_UNMARKED = "[^<]*"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_FORMATS = {
    "date": _FULL_DATE,
    "time": _FULL_TIME,
    "date-time": f"{_FULL_DATE}T{_FULL_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
}
# Groups but plain ones, word boundaries and references back: the library cannot express them.
_BEYOND_US = re.compile(r"\(\?(?!:)|\\[bBk1-9]")


def raw_texts(
    schema: Any, root: Mapping[str, Any], types: Types, *, keeps_patterns: bool = True
) -> Texts:
    """The texts that an argument of these types may be; none of them holds the value's end.

    `root` is what references are relative to. Without `keeps_patterns` only choices are kept.
    """
    found = _Reader(root, keeps_patterns=keeps_patterns).read(schema, types, _MAX_DEPTH)
    if isinstance(found, tuple):
        return tuple(text for text in found if VALUE_END not in text) or None
    return found


class _Reader:
    """One argument's schema, looked through within bounds."""

    def __init__(self, root: Mapping[str, Any], *, keeps_patterns: bool) -> None:
        self._root = root
        self._keeps_patterns = keeps_patterns
        self._num_left = _MAX_PARTS

    def read(self, schema: Any, kinds: Types, depth: int) -> Texts:
        """The texts of those values that are of these kinds."""
        self._num_left -= 1
        if schema is False:
            return ()
        if not depth or self._num_left < 0 or not isinstance(schema, Mapping):
            return None
        is_nullable = schema.get("nullable") is True and "null" in kinds
        kinds &= declared(schema)
        found = self._own(schema, kinds) if kinds else ()
        parts = [*listed(schema, "allOf")]
        if isinstance(schema.get("$ref"), str):
            parts.append(referred(schema["$ref"], self._root))
        for part in parts:
            found = _both(found, self.read(part, kinds, depth - 1))
        for name in ("anyOf", "oneOf"):
            choices = listed(schema, name)
            if choices:
                read = [self.read(each, kinds, depth - 1) for each in choices]
                found = _both(found, _either(read))
        return _either([found, ("null",)]) if is_nullable else found

    def _own(self, schema: Mapping[str, Any], kinds: Types) -> Texts:
        choices = [schema["const"]] if "const" in schema else listed(schema, "enum")
        if choices:
            return tuple(_spelled(value) for value in choices if json_types(value) & kinds)
        if not kinds <= _FEW:
            return None
        others = ("null",) * ("null" in kinds) + ("true", "false") * ("boolean" in kinds)
        if "string" not in kinds:
            return others
        strings = _strings(schema) if self._keeps_patterns else None
        return _either([strings, others]) if others else strings


def _strings(schema: Mapping[str, Any]) -> Texts:
    """What a schema's own pattern, format and lengths say of a string."""
    pattern = schema.get("pattern")
    terms = []
    if isinstance(pattern, str) and pattern and not _BEYOND_US.search(pattern):
        terms.append(_searched(pattern))
        # A text that is counted and may hold half a marker takes states that are too many.
        terms += [_UNMARKED] if "{" in pattern and "<" not in pattern else []
    else:
        pattern = ""
    name = schema.get("format")
    if isinstance(name, str) and name in _FORMATS:
        terms.append(_FORMATS[name])
    least, most = _length(schema, "minLength") or 0, _length(schema, "maxLength")
    if most is not None and least <= most <= _MAX_LENGTH:
        terms += [f"[^<]{{{least},{most}}}"] if "<" not in pattern else []
    elif most is None and 0 < least <= _MAX_FREE_LENGTH:
        terms.append(f"(?s:.{{{least},}})")
    return " & ".join(f"/{slashed(term)}/" for term in terms) or None


def slashed(pattern: str) -> str:
    """The pattern as it may stand between slashes on one line."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda part: written.get(part[0], part[0]), pattern, flags=re.S)


def literal(text: str) -> str:
    """The text itself, in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def expression(texts: tuple[str, ...] | str) -> str:
    """The texts, in a grammar."""
    return texts if isinstance(texts, str) else " | ".join(map(literal, texts))


def _both(one: Texts, other: Texts) -> Texts:
    """Texts that are among both; choices need no other bound."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(text for text in one if text in other)
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one if isinstance(one, tuple) else other
    return f"({one}) & ({other})"


def _either(many: Iterable[Texts]) -> Texts:
    """Texts that are among any of them."""
    chosen: dict[str, None] = {}
    expressions = []
    for texts in many:
        if texts is None:
            return None
        if isinstance(texts, tuple):
            chosen |= dict.fromkeys(texts)
        else:
            expressions.append(f"({texts})")
    if not expressions:
        return tuple(chosen)
    return " | ".join([*map(literal, chosen), *expressions])


def _searched(pattern: str) -> str:
    """A schema's pattern, which may be found anywhere, as one of whole texts."""
    return "|".join(map(_whole, _alternatives(pattern)))


def _whole(pattern: str) -> str:
    head, tail = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        head, pattern = "", pattern[1:]
    if re.search(r"(?<!\\)(\\\\)*\$$", pattern):
        tail, pattern = "", pattern[:-1]
    return f"{head}(?:{pattern}){tail}"


def _alternatives(pattern: str) -> list[str]:
    """The pattern cut at those bars that stand in no group and no class."""
    found, depth, is_class = [""], 0, False
    for part in re.findall(r"\\.|.", pattern, flags=re.S):
        is_class = part == "[" or (is_class and part != "]")
        if not is_class:
            depth += (part == "(") - (part == ")")
        if part == "|" and not depth and not is_class:
            found.append("")
        else:
            found[-1] += part
    return found


def _length(schema: Mapping[str, Any], name: str) -> int | None:
    found = schema.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
