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
LINES = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
NOW = "<tool_call>now</tool_call>"
ANSWERS = [
    f"\nI call the tool.</think>{CALL}",
    f"a < b </thin</think>text{CALL}<tool_call>now</tool_call> end",
    "thought without an end <tool_ca",
    f"thinking{CALL}after",
    "x</think>an <tool_call>unfinished<arg_key>k",
    "x</think><tool_call>unknown<arg_key>k</arg_key><arg_value>1</arg_value></tool_call>",
    f" <think>\ntwice</think>\n\n{LINES}\n{NOW}\n",
    f"I name <tool_call> and now <tool_call>now<arg_key> here</think>\n x {NOW} \n y",
    "x</think><tool_call>now<arg_key>a<tool_call>now\n</tool_call> \n<tool_call>no",
    f"</think> \n<tool_call>now<arg_key>k</arg_key></tool_call>{NOW}",
]


def parse(
    chunks: list[str],
    *,
    is_reasoning: bool = True,
    offered: bool = True,
    max_calls: int | None = None,
) -> list[Part]:
    parser = GlmParser(SCHEMAS if offered else {}, is_reasoning=is_reasoning, max_calls=max_calls)
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
@pytest.mark.parametrize("is_reasoning", [True, False])
@pytest.mark.parametrize("max_calls", [None, 1])
def test_every_two_way_split_gives_the_same_parts(
    answer: str, offered: bool, is_reasoning: bool, max_calls: int | None
) -> None:
    """Tool calls and the end of thinking must not depend on where a chunk ends."""

    def parts(*chunks: str) -> list[Part]:
        return parse(list(chunks), offered=offered, is_reasoning=is_reasoning, max_calls=max_calls)

    whole = parts(answer)

    assert parts(*answer) == whole
    for cut in range(len(answer) + 1):
        assert parts(answer[:cut], answer[cut:]) == whole


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
        "<think>",
        "<tool_call>now<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
        "<arg_key>",
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
    assert parse(chunks, is_reasoning=False) == parse([answer], is_reasoning=False)


@settings(deadline=None)
@given(st.lists(pieces, max_size=12).map("".join))
def test_where_there_is_no_call_all_text_is_shown(answer: str) -> None:
    """But for the markers of the thought, and white space at the beginning."""
    parts = parse([answer])
    if any(isinstance(part, ToolCall) for part in parts):
        return
    shown = "".join(part.text for part in parts if not isinstance(part, ToolCall))

    without_end = answer.replace("</think>", "", 1)
    begun = without_end.lstrip()
    assert shown in (
        without_end,
        begun.removeprefix("<think>"),
        answer.lstrip().removeprefix("<think>").replace("</think>", "", 1),
    )


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


def test_a_call_may_have_newlines_or_none() -> None:
    """glm45's form, and that of glm47 and later."""
    assert parse([LINES], is_reasoning=False) == parse([CALL], is_reasoning=False)
    assert parse(["<tool_call>now\n</tool_call>"], is_reasoning=False) == parse(
        [NOW], is_reasoning=False
    )


def test_parallel_calls_are_one_after_another_whatever_stands_between() -> None:
    """White space that only separates is nobody's text; other text is."""
    calls = [ToolCall("now", "{}"), ToolCall("now", "{}")]

    assert parse([f"x</think>\n{NOW}\n\n{NOW}\n"]) == [Reasoning("x"), *calls]
    assert parse([f"a\n{NOW} b {NOW}\nc\n"], is_reasoning=False) == [
        Content("a\n"),
        calls[0],
        Content(" b "),
        calls[1],
        Content("\nc\n"),
    ]


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        pytest.param("a</think>\n\nb\n", [Reasoning("a"), Content("\n\nb\n")], id="it-stays"),
        pytest.param("a</think>\n", [Reasoning("a"), Content("\n")], id="also-alone"),
        pytest.param("</think>b", [Content("b")], id="no-reasoning"),
        pytest.param("\n</think>b", [Reasoning("\n"), Content("b")], id="blank-reasoning"),
        pytest.param("\n<think>a</think>b", [Reasoning("a"), Content("b")], id="think-twice"),
        pytest.param("a<think>b", [Reasoning("a<think>b")], id="think-later"),
    ],
)
def test_white_space_is_the_models_own(answer: str, parts: list[Part]) -> None:
    """As peers' glm45: nothing is stripped of reasoning or content."""
    assert parse([answer]) == parts


def test_an_answer_may_begin_its_thought_itself() -> None:
    """Older templates leave that to the model."""
    assert parse(["\n<think>a</think>b"], is_reasoning=False) == [Reasoning("a"), Content("b")]


def test_naming_the_marker_in_a_thought_is_no_call() -> None:
    """Neither ends the thought, nor is the answer behind it held back."""
    parser = GlmParser(SCHEMAS, is_reasoning=True)

    parts = merge(parser.feed("I write <tool_call> before a name.</think>Yes"))

    assert parts == [Reasoning("I write <tool_call> before a name."), Content("Yes")]
    assert parse(["or <tool_call>now<arg_key></think>Yes"]) == [
        Reasoning("or <tool_call>now<arg_key>"),
        Content("Yes"),
    ]


def test_a_call_behind_one_that_is_broken_is_found() -> None:
    """The broken one is text."""
    assert parse([f"<tool_call>now<arg_key>k{NOW}"], is_reasoning=False) == [
        Content("<tool_call>now<arg_key>k"),
        ToolCall("now", "{}"),
    ]


def test_a_start_marker_within_a_value_is_the_values() -> None:
    """Who writes about calls writes such values."""
    assert argument("city", "a <tool_call>now b") == "a <tool_call>now b"


def test_with_as_many_calls_as_may_be_the_answer_is_complete() -> None:
    """What follows is not shown, in the same piece or in later ones."""
    parser = GlmParser(SCHEMAS, is_reasoning=False, max_calls=1)

    assert parser.feed("a") == [Content("a")]
    assert not parser.is_complete
    assert parser.feed(f"{NOW}b{NOW}") == [ToolCall("now", "{}")]
    assert parser.is_complete
    assert parser.feed("c") == parser.flush() == []


def test_a_parser_knows_whether_it_is_in_the_thought() -> None:
    """Reasoning tokens are counted by it."""
    parser = GlmParser(SCHEMAS, is_reasoning=True)
    seen = []
    for text in ["a", "</thi", "nk>", "b"]:
        parser.feed(text)
        seen.append(parser.is_reasoning)

    assert seen == [True, True, False, False]


def test_arguments_are_always_utf8_json() -> None:
    """Also what JSON can read but no response may hold."""
    assert argument("unknown", '"\\ud800"') == '"\\ud800"'
    assert argument("unknown", '["\\ud800"]') == '["\\ud800"]'
    assert argument("unknown", "1e999") == "1e999"
    assert argument("unknown", "[" * 100_000) == "[" * 100_000


def test_a_long_value_in_many_pieces_takes_no_longer_than_its_length() -> None:
    """Each piece is looked at once: a file written by a call may have a megabyte."""
    value = "line of a file\n" * 40_000
    parser = GlmParser(SCHEMAS, is_reasoning=False)

    parts = parser.feed("<tool_call>get_weather<arg_key>city</arg_key><arg_value>")
    for start in range(0, len(value), 4):
        parts += parser.feed(value[start : start + 4])
    parts += parser.feed("</arg_value></tool_call>")

    assert parts == [ToolCall("get_weather", json.dumps({"city": value}))]


def test_plain_text_has_no_markup() -> None:
    """The completions API returns what the model wrote."""
    parser = PlainParser()

    assert parser.feed("a</think>") == [Content("a</think>")]
    assert parser.feed("") == parser.flush() == []
