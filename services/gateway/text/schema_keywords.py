"""Clients' schemas as the grammars' library takes them. Pure.

From an answer's schema goes what is to be ignored: formats that are not known, and keywords that
mean nothing where they stand. Keywords that cannot be kept are refused by name.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from services.gateway.failures import InvalidRequest

_FORMATS = (  # the library's
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
_REFUSED = (
    "not",
    "if",
    "uniqueItems",
    "contains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
_MOOT = {  # keyword -> as JSON, values that demand nothing
    "not": ("false",),
    "uniqueItems": ("false",),
    "propertyNames": ("true", "{}"),
    "dependentRequired": ("{}",),
    "dependentSchemas": ("{}",),
    "dependencies": ("{}",),
    "unevaluatedProperties": ("true", "{}"),
    "unevaluatedItems": ("true", "{}"),
}
# Without those above these mean nothing.
_LONE = ("then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")


def kept_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what is to be ignored. Raises InvalidRequest for what cannot be kept."""
    return _mended(schema, _mend)


def without_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema without patterns that may be beyond the library."""
    return _mended(schema, lambda part: part.pop("pattern", None))


def _mended(schema: dict[str, Any], mend: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A copy, of which each part was mended."""
    whole: dict[str, Any] = json.loads(json.dumps(schema))
    waiting: list[Any] = [whole]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            mend(part)
            waiting.extend(_parts(part))
    return whole


def _mend(part: dict[str, Any]) -> None:
    for name in _REFUSED:
        if name in part and json.dumps(part[name]) not in _MOOT.get(name, ()):
            raise InvalidRequest(
                f"the schema's keyword {name!r} cannot be kept",
                param="response_format",
                code="unsupported_value",
            )
        part.pop(name, None)
    for name in _LONE:
        part.pop(name, None)
    if part.get("format") not in _FORMATS:
        part.pop("format", None)


def _parts(part: dict[str, Any]) -> Iterator[Any]:
    """The schemas that stand in this one."""
    for name, value in part.items():
        if name in _MAPS and isinstance(value, dict):
            yield from value.values()
        elif name in _LISTS and isinstance(value, list):
            yield from value
        elif name in _SINGLE:
            yield from value if isinstance(value, list) else [value]
