"""Types of arguments by every way that schemas state them."""

import time
from typing import Any

import pytest

from services.gateway.text.schema_types import SchemaTypes, typed

ANY = {"string", "number", "integer", "boolean", "null", "object", "array"}


def types(declared: Any, **root: Any) -> set[str]:
    return set(SchemaTypes({"properties": {"k": declared}, **root}).of_argument("k"))


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        pytest.param({"type": "string"}, {"string"}, id="one"),
        pytest.param({"type": ["string", "null"]}, {"string", "null"}, id="several"),
        pytest.param({"type": "number"}, {"number", "integer"}, id="a-number-may-be-an-integer"),
        pytest.param({"type": "string", "nullable": True}, {"string", "null"}, id="nullable"),
        pytest.param({"enum": ["a", 1, None]}, {"string", "integer", "number", "null"}, id="enum"),
        pytest.param({"const": True}, {"boolean"}, id="const"),
        pytest.param({"type": "string", "enum": ["a", 1]}, {"string"}, id="type-and-enum"),
        pytest.param(
            {"anyOf": [{"type": "string"}, {"type": "array"}]}, {"string", "array"}, id="any"
        ),
        pytest.param(
            {"oneOf": [{"type": "object"}, {"const": 0}]},
            {"object", "integer", "number"},
            id="one-of",
        ),
        pytest.param({"anyOf": [{"type": "string"}, {}]}, ANY, id="any-of-anything"),
        pytest.param(
            {"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, {"integer"}, id="all"
        ),
        pytest.param({"$ref": "#/$defs/s"}, {"string"}, id="reference"),
        pytest.param({"$ref": "#/definitions/a~1b"}, {"array"}, id="escaped-reference"),
        pytest.param({"$ref": "#/$defs/chain"}, {"string"}, id="reference-to-a-reference"),
        pytest.param({"$ref": "#/$defs/loop"}, ANY, id="reference-to-itself"),
        pytest.param({"$ref": "#/nowhere"}, ANY, id="reference-to-nothing"),
        pytest.param({"$ref": "http://x/y"}, ANY, id="reference-elsewhere"),
        pytest.param({}, ANY, id="silent"),
        pytest.param(True, ANY, id="true"),
        pytest.param({"type": {"odd": 1}, "anyOf": 3, "enum": 4}, ANY, id="nonsense"),
    ],
)
def test_an_argument_has_the_types_that_its_schema_allows(
    declared: Any, expected: set[str]
) -> None:
    """Whatever JSON Schema offers to say so."""
    definitions = {
        "s": {"type": "string"},
        "chain": {"$ref": "#/$defs/s"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
    }

    found = types(declared, **{"$defs": definitions, "definitions": {"a/b": {"type": "array"}}})

    assert found == expected


def test_properties_may_be_declared_in_parts() -> None:
    """The earlier part wins, and only what always holds makes a key required."""
    schema = SchemaTypes(
        {
            "properties": {"a": {"type": "string"}},
            "required": ["a"],
            "allOf": [
                {"properties": {"a": {"type": "null"}, "b": {"type": "integer"}}, "required": ["b"]}
            ],
            "anyOf": [{"$ref": "#/$defs/c"}],
            "$defs": {"c": {"properties": {"c": {"type": "boolean"}}, "required": ["c"]}},
            "additionalProperties": {"type": "array"},
        }
    )

    assert [set(schema.of_argument(key)) for key in "abcd"] == [
        {"string"},
        {"integer"},
        {"boolean"},
        {"array"},
    ]
    assert list(schema.properties) == ["a", "b", "c"]
    assert schema.required == {"a", "b"}


def test_references_that_double_are_followed_once() -> None:
    """A schema is a stranger's."""
    links: dict[str, Any] = {
        f"d{i}": {
            "anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2,
            "allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2,
        }
        for i in range(40)
    }
    begun_s = time.monotonic()

    assert types({"$ref": "#/$defs/d0"}, **{"$defs": links}) == ANY
    schema = SchemaTypes({"$ref": "#/$defs/d0", "$defs": links})
    assert schema.of_argument("k") == ANY
    assert schema.properties == {}
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize(
    ("text", "allowed", "value"),
    [
        pytest.param("123", {"string"}, "123", id="a-string-of-digits"),
        pytest.param("true", {"string"}, "true", id="a-string-of-a-word"),
        pytest.param("true", {"boolean"}, True, id="a-boolean"),
        pytest.param("1", {"boolean"}, "1", id="one-is-no-boolean"),
        pytest.param("3.0", {"integer"}, 3, id="an-integer-with-a-point"),
        pytest.param("3.5", {"integer"}, "3.5", id="no-integer"),
        pytest.param("3", {"number", "integer"}, 3, id="a-whole-number"),
        pytest.param(
            '[["a"], [1, {"b": null}]]', {"array"}, [["a"], [1, {"b": None}]], id="nested"
        ),
        pytest.param(" 3\n", {"integer"}, 3, id="blanks-around-json"),
        pytest.param('"q"', {"string", "integer"}, '"q"', id="quotes-are-the-strings"),
        pytest.param("Infinity", ANY, "Infinity", id="infinity"),
        pytest.param("9" * 5000, ANY, "9" * 5000, id="digits-beyond-measure"),
    ],
)
def test_a_value_is_json_only_where_its_types_allow_it(
    text: str, allowed: set[str], value: Any
) -> None:
    """Else it is the text that the model wrote."""
    found = typed(text, frozenset(allowed))

    assert found == value
    assert type(found) is type(value)
