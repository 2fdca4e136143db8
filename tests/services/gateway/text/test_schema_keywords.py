"""Schemas of answers: what is to be ignored is, and what cannot be kept is named."""

from typing import Any

import pytest

from services.gateway.ask import JsonSchema
from services.gateway.failures import InvalidRequest
from services.gateway.text.grammars import grammar_of
from services.gateway.text.schema_keywords import kept_schema
from tests.services.gateway.text.test_grammars import fits

STRING = {"type": "string"}


@pytest.mark.parametrize(
    "name", ["password", "binary", "path", "regex", "iri", "byte", "uri-reference", 7]
)
def test_unknown_formats_are_ignored_at_any_depth(name: Any) -> None:
    """As JSON schema says; pydantic writes several of them."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/s"}}},
        "required": ["a"],
        "$defs": {"s": {"type": "string", "format": name}},
    }

    grammar = grammar_of(JsonSchema(schema), None, is_reasoning=False)

    assert fits(grammar, '{"a": ["x"]}')
    assert not fits(grammar, '{"a": [1]}')
    assert schema["$defs"]["s"]["format"] == name  # type: ignore[index]


def test_known_formats_are_kept() -> None:
    """Ignoring is for the unknown."""
    grammar = grammar_of(JsonSchema({**STRING, "format": "date"}), None, is_reasoning=False)

    assert fits(grammar, '"2026-02-03"')
    assert not fits(grammar, '"x"')


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("uniqueItems", False),
        ("unevaluatedProperties", True),
        ("propertyNames", {}),
        ("then", {}),
        ("minContains", 1),
        ("contentEncoding", "base64"),
        ("x-anything", [1]),
        ("readOnly", True),
    ],
)
def test_keywords_that_demand_nothing_are_ignored(keyword: str, value: Any) -> None:
    """Annotations, defaults, and what means nothing without another keyword."""
    schema = {"properties": {"a": {"anyOf": [{**STRING, keyword: value}]}}}

    assert grammar_of(JsonSchema(schema), None, is_reasoning=False)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", STRING),
        ("if", {}),
        ("uniqueItems", True),
        ("contains", {}),
        ("propertyNames", {"pattern": "a"}),
        ("dependentRequired", {"a": ["b"]}),
        ("unevaluatedProperties", False),
    ],
)
def test_a_keyword_that_cannot_be_kept_is_named(keyword: str, value: Any) -> None:
    """The client would rely on it."""
    with pytest.raises(InvalidRequest, match=repr(keyword).replace("$", ".")) as caught:
        kept_schema({"items": [{"anyOf": [{keyword: value}]}]})

    assert caught.value.param == "response_format"


def test_names_and_values_are_no_keywords() -> None:
    """A property may be called `not`, and a choice may look like a schema."""
    schema = {
        "properties": {"not": STRING, "format": STRING},
        "enum": [{"uniqueItems": True, "format": "x"}],
        "default": {"if": 1},
    }

    assert kept_schema(schema) == schema
