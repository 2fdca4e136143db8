"""Raw values of arguments: what their schemas say of strings holds, in grammars and alone."""

import time
from typing import Any

import pytest

from services.gateway.ask import Chat
from services.gateway.text.grammars import grammar_of
from services.gateway.text.raw_values import raw_texts
from tests.services.gateway.text.test_grammars import fits

COLOR = {"enum": ["red", "green"], "type": "string"}
NAMED = {"$ref": "#/$defs/Color"}


def grammar(schema: Any) -> str | None:
    parameters = {"properties": {"c": schema}, "required": ["c"], "$defs": {"Color": COLOR}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return grammar_of(None, Chat([], [tool], "required"), is_reasoning=False)


def spoken(value: str) -> str:
    return f"<tool_call>f<arg_key>c</arg_key><arg_value>{value}</arg_value></tool_call>"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        pytest.param(NAMED, ["red"], ["blue", "null"], id="reference"),
        pytest.param({"allOf": [NAMED]}, ["green"], ["x"], id="all-of"),
        pytest.param({"allOf": [NAMED, {"enum": ["red"]}]}, ["red"], ["green"], id="both"),
        pytest.param({"anyOf": [NAMED, {"type": "null"}]}, ["red", "null"], ["x"], id="optional"),
        pytest.param({**COLOR, "nullable": True}, ["red", "null"], ["x"], id="nullable"),
        pytest.param({"oneOf": [NAMED, {"const": "x"}]}, ["red", "x"], ["y"], id="one-of"),
        pytest.param({"type": "string", "const": "fixed"}, ["fixed"], ["fix"], id="const"),
        pytest.param({"enum": ["a", None, 1, True]}, ["a", "null", "1", "true"], ["2"], id="mixed"),
        pytest.param({"type": "string", "enum": ["a", None]}, ["a"], ["null"], id="not-its-type"),
        pytest.param(
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ["AB-1"], ["ab-1", "AB-1x"], id="p"
        ),
        pytest.param(
            {"type": "string", "pattern": "b<"}, ["ab<c", "b<"], ["ab"], id="found-within"
        ),
        pytest.param(
            {"type": "string", "pattern": "^a|[|]|b$"}, ["ax", "x|x", "xb"], ["xa"], id="bars"
        ),
        pytest.param(
            {"type": "string", "pattern": "^.{1,100}$"}, ["river" * 20], ["", "<"], id="counted"
        ),
        pytest.param({"type": "string", "maxLength": 3}, ["", "日本語"], ["abcd"], id="longest"),
        pytest.param({"type": "string", "minLength": 2}, ["a<", "abc"], ["a"], id="shortest"),
        pytest.param(
            {"type": "string", "minLength": 2, "maxLength": 3, "pattern": "b"},
            ["ab", "abc"],
            ["b", "abcd", "aa"],
            id="lengths-and-pattern",
        ),
        pytest.param(
            {"type": ["string", "null"], "maxLength": 2}, ["ab", "null"], ["abc"], id="or-null"
        ),
        pytest.param(
            {"type": "string", "format": "date"}, ["2026-02-03"], ["2026-13-03", "x"], id="date"
        ),
        pytest.param(
            {"type": "string", "format": "date-time"},
            ["2026-02-03T04:05:06Z", "2026-02-03T04:05:06.7+01:00"],
            ["2026-02-03"],
            id="date-time",
        ),
        pytest.param({"type": "string", "format": "email"}, ["a.b@c.de"], ["a", "a@b"], id="email"),
        pytest.param({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"], id="ip"),
    ],
)
def test_a_forced_call_s_strings_are_of_their_schema(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    """Clients parse them into types that refuse anything else."""
    found = grammar(schema)

    assert [text for text in good if not fits(found, spoken(text))] == []
    assert [text for text in bad if fits(found, spoken(text))] == []


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"type": "string"}, id="nothing-said"),
        pytest.param({"type": "string", "pattern": "(?=a)b"}, id="look-ahead"),
        pytest.param({"type": "string", "pattern": "(^a|b$)"}, id="anchors-within"),
        pytest.param({"type": "string", "pattern": "a("}, id="no-pattern"),
        pytest.param({"type": "string", "format": "password"}, id="unknown-format"),
        pytest.param({"type": "string", "maxLength": 10**9}, id="enormous-length"),
        pytest.param({"anyOf": [NAMED, {"type": "integer"}]}, id="or-a-number"),
        pytest.param({"type": "string", "enum": ["a</arg_value>b"]}, id="cannot-be-told"),
        pytest.param({"type": "string", "maxLength": True, "minLength": -1}, id="no-lengths"),
    ],
)
def test_what_cannot_be_bound_is_any_text(schema: Any) -> None:
    """A tool's schema is a hint there, never a refusal."""
    found = grammar(schema)

    assert fits(found, spoken("(b) <c>"))
    assert not fits(found, spoken("a</arg_value>b"))


def test_a_pattern_beyond_us_leaves_choices_bound() -> None:
    """Only patterns, formats and lengths are given up for it."""
    found = grammar({"anyOf": [NAMED, {"type": "null"}], "pattern": "a("})

    assert fits(found, spoken("red"))
    assert not fits(found, spoken("blue"))


def test_a_pattern_beyond_us_within_json_is_given_up_too() -> None:
    """Its types still hold."""
    found = grammar({"type": "array", "items": {"type": "string", "pattern": "(?=a)b"}})

    assert fits(found, spoken('["x"]'))
    assert not fits(found, spoken("[1]"))


@pytest.mark.parametrize("join", ["anyOf", "allOf", "oneOf"])
def test_a_schema_that_doubles_at_every_step_is_read_in_time(join: str) -> None:
    """2^30 parts by 30 references."""
    links = {f"d{i}": {join: [{"$ref": f"#/d{i + 1}"}] * 2} for i in range(30)}
    begun_s = time.monotonic()

    raw_texts({"$ref": "#/d0"}, {**links, "d30": COLOR}, frozenset({"string"}))

    assert time.monotonic() - begun_s < 1


def test_a_schema_that_refers_to_itself_is_any_text() -> None:
    """There is no end to it."""
    assert raw_texts({"$ref": "#"}, {"$ref": "#"}, frozenset({"string"})) is None
