"""The GLM answer parser: the same parts for every chunking, and no text lost."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.answer import merge
from services.gateway.text.glm import Content, GlmParser, Part, PlainParser, Reasoning, ToolCall

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": ["string", "null"]},
            "near": {"type": "array"},
            "either": {"anyOf": [{"type": "string"}, {"type": "object"}]},
            "share": {"type": "number"},
        },
    },
    "now": {},
}
CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
ANSWERS = [
    f"\nI call the tool.</think>{CALL}",
    f"a < b </thin</think>text{CALL}<tool_call>now</tool_call> end",
    "thought without an end <tool_ca",
    f"thinking{CALL}after",
    "x</think>an <tool_call>unfinished<arg_key>k",
    "x</think><tool_call>unknown<arg_key>k</arg_key><arg_value>1</arg_value></tool_call>",
]


def parse(chunks: list[str], *, is_reasoning: bool = True, offered: bool = True) -> list[Part]:
    parser = GlmParser(SCHEMAS if offered else {}, is_reasoning=is_reasoning)
    parts = [part for chunk in chunks for part in parser.feed(chunk)]
    return merge(parts + parser.flush())


def call(arguments_markup: str) -> dict[str, object]:
    (part,) = parse([f"<tool_call>get_weather{arguments_markup}</tool_call>"], is_reasoning=False)
    assert isinstance(part, ToolCall)
    return dict(json.loads(part.arguments))


def argument(key: str, value: str) -> object:
    return call(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")[key]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("offered", [True, False])
def test_every_two_way_split_gives_the_same_parts(answer: str, offered: bool) -> None:
    """Tool calls and the end of thinking must not depend on where a chunk ends."""
    whole = parse([answer], offered=offered)

    for cut in range(len(answer) + 1):
        assert parse([answer[:cut], answer[cut:]], offered=offered) == whole


pieces = st.sampled_from(
    [
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "now",
        "<arg_key>k</arg_key>",
        "<arg_value>1",
        "<",
        "</arg_value>",
        "text",
        "</",
        "\n",
        "get_weather",
    ]
)


@settings(deadline=None)
@given(st.lists(pieces, max_size=12).map("".join), st.data())
def test_random_markup_gives_the_same_parts_for_random_chunking(
    answer: str, data: st.DataObject
) -> None:
    """Broken markup is where parsers differ between chunkings."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    edges = [0, *cuts, len(answer)]
    chunks = [answer[a:b] for a, b in pairwise(edges)]

    assert parse(chunks) == parse([answer])


def test_reasoning_ends_at_its_marker_which_is_never_shown() -> None:
    """Clients get thought and answer in different fields."""
    assert parse(["thought</think>answer"]) == [Reasoning("thought"), Content("answer")]


def test_a_tool_call_ends_the_reasoning() -> None:
    """The model sometimes calls without closing its thought first."""
    assert parse(["hm<tool_call>now</tool_call>"]) == [Reasoning("hm"), ToolCall("now", "{}")]


def test_calls_are_text_when_no_tools_were_offered() -> None:
    """Whoever offered no tool cannot handle a call."""
    assert parse(["x</think><tool_call>now</tool_call>"], offered=False) == [
        Reasoning("x"),
        Content("<tool_call>now</tool_call>"),
    ]


@pytest.mark.parametrize(
    "body",
    ["nobody", "", "now<arg_key>k", "now<arg_key>k</arg_key>", "now<arg_value>1</arg_value>"],
)
def test_a_malformed_call_stays_visible_as_text(body: str) -> None:
    """What the model said is never swallowed."""
    text = f"<tool_call>{body}</tool_call>"

    assert parse([text], is_reasoning=False) == [Content(text)]


def test_an_unfinished_call_stays_visible_as_text() -> None:
    """The answer was cut by its length."""
    assert parse(["<tool_call>now<arg"], is_reasoning=False) == [Content("<tool_call>now<arg")]


@pytest.mark.parametrize(
    ("key", "value", "typed"),
    [
        pytest.param("city", "12", "12", id="a-string-stays-a-string"),
        pytest.param("days", "12", 12, id="an-integer"),
        pytest.param("days", "soon", "soon", id="what-is-not-json-is-text"),
        pytest.param("units", "null", None, id="null-where-allowed"),
        pytest.param("units", "12", "12", id="no-integer-where-a-string-is-due"),
        pytest.param("near", '["Lyon"]', ["Lyon"], id="an-array"),
        pytest.param("either", '{"a": 1}', {"a": 1}, id="the-object-of-an-any-of"),
        pytest.param("either", "plain", "plain", id="the-string-of-an-any-of"),
        pytest.param("share", "0.5", 0.5, id="a-number"),
        pytest.param("share", "NaN", "NaN", id="nan-is-not-json"),
        pytest.param("unknown", "true", True, id="an-undeclared-key"),
        pytest.param("city", " two\nlines <b> ", " two\nlines <b> ", id="spaces-are-the-value's"),
    ],
)
def test_an_argument_has_the_type_of_the_schema(key: str, value: str, typed: object) -> None:
    """Strings stand raw in this format, so only the schema can tell 12 from "12"."""
    assert argument(key, value) == typed


def test_plain_text_has_no_markup() -> None:
    """The completions API returns what the model wrote."""
    parser = PlainParser()

    assert parser.feed("a</think>") == [Content("a</think>")]
    assert parser.feed("") == parser.flush() == []
