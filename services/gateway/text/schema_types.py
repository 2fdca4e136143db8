"""The types that a JSON schema gives a tool's arguments, and an argument's text as such a value.

In GLM's markup strings stand raw and other values as JSON, so only the schema can tell 12 from
"12". Knows of schemas what decides a type; validates nothing.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

Types = frozenset[str]

_ANY: Types = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 32  # references and choices within one another; what lies deeper is of any type
_MAX_PARTS = 1024  # looked through for an argument; beyond them it is of any type

# Names of a Python value's JSON type; bool before int, since a bool is an int.
_NAMES: tuple[tuple[type, Types], ...] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
    (type(None), frozenset({"null"})),
)


class SchemaTypes:
    """The types of one tool's arguments; each is found out once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self._properties: dict[str, Any] | None = None
        self._arguments: dict[str, Types] = {}
        self._references: dict[str, Types] = {}

    def of_argument(self, key: str) -> Types:
        """The JSON types that the schema allows for an argument; all where it does not say."""
        if key not in self._arguments:
            self._arguments[key] = self._types(self._argument(key), _MAX_DEPTH)
        return self._arguments[key]

    @property
    def properties(self) -> dict[str, Any]:
        """The declared arguments' schemas by key, in the schema's order."""
        found: dict[str, Any] = {}
        for part in self._parts(("allOf", "anyOf", "oneOf")):
            properties = part.get("properties")
            if isinstance(properties, Mapping):
                found |= {key: each for key, each in properties.items() if key not in found}
        return found

    @property
    def required(self) -> set[str]:
        """The keys of arguments that may not be left out."""
        lists = [listed(part, "required") for part in self._parts(("allOf",))]
        return {key for keys in lists for key in keys if isinstance(key, str)}

    def _argument(self, key: str) -> Any:
        if self._properties is None:
            self._properties = self.properties
        return self._properties.get(key, self.schema.get("additionalProperties"))

    def _parts(self, joined_by: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """The schema and those that it is made of, what they refer to included."""
        return islice(self._all_parts(self.schema, joined_by, _MAX_DEPTH), _MAX_PARTS)

    def _all_parts(
        self, schema: Any, joined_by: Sequence[str], depth: int
    ) -> Iterator[Mapping[str, Any]]:
        if depth and isinstance(schema, Mapping):
            yield schema
            target = referred(schema.get("$ref"), self.schema)
            yield from self._all_parts(target, joined_by, depth - 1)
            for name in joined_by:
                for part in listed(schema, name):
                    yield from self._all_parts(part, joined_by, depth - 1)

    def _types(self, schema: Any, depth: int) -> Types:
        if not depth or not isinstance(schema, Mapping):
            return _ANY
        found = declared(schema)
        if isinstance(schema.get("$ref"), str):
            found &= self._types_of_reference(schema["$ref"], depth - 1)
        for part in listed(schema, "allOf"):
            found &= self._types(part, depth - 1)
        for name in ("anyOf", "oneOf"):
            choices = [self._types(each, depth - 1) for each in listed(schema, name)]
            found &= frozenset().union(*choices) if choices else _ANY
        return found | {"null"} if schema.get("nullable") is True else found

    def _types_of_reference(self, reference: str, depth: int) -> Types:
        if reference not in self._references:
            self._references[reference] = _ANY  # while it is looked at: it may refer to itself
            target = referred(reference, self.schema)
            self._references[reference] = self._types(target, depth)
        return self._references[reference]


def typed(text: str, types: Types) -> Any:
    """The value as JSON where these types allow what it parses to; else the text itself."""
    if types == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        # What is read may still not be writable: lone surrogates, nesting at the limit.
        json.dumps([value], ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    if isinstance(value, str):
        return text  # a string stands raw: quotes are its own
    return value if json_types(value) & types else text


def declared(schema: Mapping[str, Any]) -> Types:
    """What type, enum and const say."""
    kinds = schema.get("type", _ANY)
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else _ANY
    found = _ANY & {kind for kind in named if isinstance(kind, str)}
    if "number" in found:
        found |= {"integer"}
    if isinstance(schema.get("enum"), list):
        found &= frozenset().union(*map(json_types, schema["enum"]))
    if "const" in schema:
        found &= json_types(schema["const"])
    return found


def referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference points to within the root; None where it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = root
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping) or name not in place:
            return None
        place = place[name]
    return place


def listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    """The list of this name; empty where there is none."""
    found = schema.get(name)
    return found if isinstance(found, list) else []


def json_types(value: Any) -> Types:
    """The JSON types of a value."""
    return next((names for kind, names in _NAMES if isinstance(value, kind)), frozenset())


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond a float")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
