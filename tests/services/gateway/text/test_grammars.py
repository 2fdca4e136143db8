"""Grammars of answers: what is asked for fits, nothing else does, and bombs are refused in time."""

import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.ask import (
    Chat,
    Form,
    JsonObject,
    JsonSchema,
    Lark,
    Named,
    OneOf,
    Regex,
    ToolChoice,
)
from services.gateway.failures import InvalidRequest
from services.gateway.text.glm import GlmParser, ToolCall
from services.gateway.text.grammars import grammar_of
from shared.errors import BadRequest
from shared.grammar import Vocabulary

CHECKPOINT = Path(__file__).parents[4] / "checkpoints" / "demo-fp8"
TOKENIZER = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
VOCABULARY = Vocabulary(CHECKPOINT, 4096)

PARAMETERS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"], "type": "string"},
            "spots": {"type": "array", "items": {"$ref": "#/$defs/spot"}},
        },
        "required": ["city", "spots"],
        "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "now": {},
    "tag": {"type": "object", "additionalProperties": {"type": "integer"}},
}
WEATHER = (
    '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bad </Town> "1"\n</arg_value>'
    '<arg_key>spots</arg_key><arg_value>[{"x": 1.5}]</arg_value></tool_call>'
)
LINES = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ürgüp</arg_value>\n"
    "<arg_key>units</arg_key>\n<arg_value>F</arg_value>\n"
    "<arg_key>spots</arg_key>\n<arg_value>[]</arg_value>\n</tool_call>"
)
NOW = "<tool_call>now</tool_call>"


def chat(choice: ToolChoice, *, is_parallel: bool = True, **parameters: Any) -> Chat:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (parameters or PARAMETERS).items()
    ]
    return Chat([], tools, choice, is_parallel)


def fits(grammar: str | None, text: str) -> bool:
    """Whether a worker could write exactly this."""
    assert grammar is not None
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    try:
        return VOCABULARY.constraint(grammar, ids).is_complete
    except BadRequest as error:
        assert "does not fit" in str(error)
        return False


def form(asked: Form, *, is_reasoning: bool = False) -> str | None:
    return grammar_of(asked, None, is_reasoning=is_reasoning)


def forced(asked: Chat, *, is_reasoning: bool = False) -> str | None:
    return grammar_of(None, asked, is_reasoning=is_reasoning)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        pytest.param(JsonObject(), '{"a": [1, {"b": null}]}', "[1]", id="json-object"),
        pytest.param(JsonSchema({"type": "array"}), "[1]", "{}", id="schema"),
        pytest.param(JsonSchema(True), '"x"', "x", id="schema-true"),
        pytest.param(
            JsonSchema({"oneOf": [{"type": "string"}, {"type": "null"}]}), "null", "1", id="one-of"
        ),
        pytest.param(
            JsonSchema({"type": "object"}), '{\n  "a": [1, 2]\n}', '{"a":   1}', id="white-space"
        ),
        pytest.param(Regex(r"^a/b\/\d{2}$"), "a/b/12", "a/b12", id="pattern-with-slashes"),
        pytest.param(Regex("a\nb|c"), "a\nb", "a", id="pattern-with-a-newline"),
        pytest.param(OneOf(('"ja"', "jawohl\n", "é\\")), "é\\", "ja", id="choices"),
        pytest.param(Lark('start: A B\nA: /a+/\nB: "b"'), "aab", "aa", id="lark"),
    ],
)
def test_a_form_binds_the_answer_and_leaves_the_thought_free(
    asked: Form, good: str, bad: str
) -> None:
    """The thought ends at the first marker; what follows is of the form."""
    plain, thoughtful = form(asked), form(asked, is_reasoning=True)

    assert fits(plain, good)
    assert not fits(plain, bad)
    assert fits(thoughtful, f'hm, {{"a"}} or </thin\n</think>{good}')
    assert fits(thoughtful, f"</think>{good}")
    assert not fits(thoughtful, f"hm</think>{bad}")
    assert not fits(thoughtful, good)


@pytest.mark.parametrize("text", [WEATHER, LINES, NOW, f"{NOW}{WEATHER}", f"{NOW}\n{LINES}"])
def test_a_required_call_may_be_any_in_either_form_and_is_read_as_such(text: str) -> None:
    """What the grammar lets through, the parser takes for calls."""
    grammar = forced(chat("required"), is_reasoning=True)
    parser = GlmParser(PARAMETERS, is_reasoning=True)

    assert fits(grammar, f"hm</think>{text}")
    parts = [*parser.feed(f"hm</think>{text}"), *parser.flush()][1:]
    assert parts
    assert all(isinstance(part, ToolCall) for part in parts)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="no-call"),
        pytest.param("Sure.", id="text"),
        pytest.param("<tool_call>nobody</tool_call>", id="an-unknown-tool"),
        pytest.param("<tool_call>get_weather</tool_call>", id="without-a-required-key"),
        pytest.param(WEATHER.replace("[{", "[{,"), id="broken-json"),
        pytest.param(WEATHER.replace("Town", "tool_call"), id="an-end-within-a-value"),
        pytest.param(LINES.replace(">F<", ">K<"), id="not-of-the-enum"),
        pytest.param(f"{NOW} x", id="text-behind-a-call"),
        pytest.param("<tool_call>now<arg_key>a</arg_key>", id="an-undeclared-key"),
    ],
)
def test_a_required_call_cannot_be_avoided_or_malformed(text: str) -> None:
    """The client relies on it."""
    assert not fits(forced(chat("required")), text)


def test_a_call_cannot_be_hidden_in_the_thought() -> None:
    """The parser would take it for the call, with arguments that nothing has checked."""
    grammar = forced(chat("required"), is_reasoning=True)

    assert not fits(grammar, f"hm <tool_call>get_weather</tool_call></think>{NOW}")


def test_a_named_tool_is_called_once_and_no_other() -> None:
    """Also where more calls would be allowed."""
    grammar = forced(chat(Named("now")))

    assert fits(grammar, NOW)
    assert not fits(grammar, NOW + NOW)
    assert not fits(grammar, WEATHER)


def test_not_parallel_is_one_call() -> None:
    """Exactly one."""
    grammar = forced(chat("required", is_parallel=False))

    assert fits(grammar, WEATHER)
    assert not fits(grammar, NOW + WEATHER)


def test_free_keys_have_values_of_their_schema() -> None:
    """A tool may declare a map."""
    grammar = forced(chat(Named("tag")))
    argument = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"

    assert fits(grammar, f"<tool_call>tag{argument.format('é b', 1)}</tool_call>")
    assert fits(grammar, "<tool_call>tag</tool_call>")
    assert not fits(grammar, f"<tool_call>tag{argument.format('a', 'x')}</tool_call>")


def test_with_a_form_and_tools_the_answer_is_one_or_the_other() -> None:
    """A form is of the answer proper, and a call is none."""
    grammar = grammar_of(JsonObject(), chat("auto"), is_reasoning=True)

    assert fits(grammar, "hm</think>{}")
    assert fits(grammar, f"hm</think>{NOW}")
    assert not fits(grammar, "hm</think>text")


def test_nothing_asked_is_no_grammar() -> None:
    """Any text is right then."""
    assert grammar_of(None, None, is_reasoning=True) is None
    assert grammar_of(None, chat("auto"), is_reasoning=False) is None


@settings(max_examples=60, deadline=None)
@given(value=st.text(max_size=12), key=st.text("aé\"\\'/ 한_-", min_size=1, max_size=6))
def test_any_string_without_end_markers_fits_under_any_key(value: str, key: str) -> None:
    """Names and texts with quotes, slashes and control characters."""
    parameters = {"properties": {key: {"type": "string"}}, "required": [key]}
    text = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    if key.strip() != key or "<" in value:
        return

    assert fits(forced(chat("required", f=parameters)), text)


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(join: str) -> dict[str, Any]:
    links = {
        f"d{i}": {join: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(30)
    }
    return {"$defs": {**links, "d30": {"type": "string"}}, "$ref": "#/$defs/d0"}


CROSS = {
    "allOf": [
        {"anyOf": [{"properties": {f"p{i}{j}": {}}, "required": [f"p{i}{j}"]} for j in range(8)]}
        for i in range(8)
    ]
}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(Regex("((a+)+)+b"), id="nested-quantifiers"),
        pytest.param(Regex("((a{1,1000}){1,1000}){1,1000}"), id="huge-repetition"),
        pytest.param(Regex(".*a.{300}b"), id="exponential-states"),
        pytest.param(Regex("(" * 5000 + "a" + ")" * 5000), id="deep-parentheses"),
        pytest.param(OneOf(tuple(f"choice number {i}" for i in range(10_000))), id="10000-choices"),
        pytest.param(JsonSchema(deep(300)), id="deep-schema"),
        pytest.param(JsonSchema({"$ref": "#"}), id="endless-reference"),
        pytest.param(JsonSchema(doubling("anyOf")), id="doubling-any-of"),
        pytest.param(JsonSchema(doubling("allOf")), id="doubling-all-of"),
        pytest.param(JsonSchema(CROSS), id="product-of-choices"),
        pytest.param(
            JsonSchema({"properties": {f"p{i}": {} for i in range(20_000)}}), id="20000-properties"
        ),
        pytest.param(
            JsonSchema({"type": "string", "pattern": "(a{1,1000}){1,1000}"}), id="pattern"
        ),
        pytest.param(JsonSchema({"enum": ["x" * 20] * 50_000}), id="enormous-enum"),
        pytest.param(Lark('start: e\ne: e e | "a" | e e e'), id="ambiguous-grammar"),
        pytest.param(Lark("start: " + "(" * 3000 + '"a"' + ")" * 3000), id="deep-grammar"),
        pytest.param(Lark('start: (("x"{1,1000}){1,1000}){1,1000}'), id="nested-repetition"),
    ],
)
def test_a_bomb_is_refused_or_used_within_seconds(asked: Form) -> None:
    """By the gateway, or by a worker at its first token; neither stands still over it."""
    begun_s = time.monotonic()

    try:
        grammar = form(asked, is_reasoning=True)
        assert grammar is not None
        constraint = VOCABULARY.constraint(grammar)
        constraint.mask()
    except BadRequest:
        pass

    assert time.monotonic() - begun_s < 5  # a tenth where nothing else runs


@pytest.mark.parametrize(
    ("asked", "param", "complaint"),
    [
        pytest.param(Regex("(?=x)y"), "structured_outputs", "look-around", id="look-ahead"),
        pytest.param(Regex(""), "structured_outputs", "empty", id="empty-pattern"),
        pytest.param(Regex("a("), "structured_outputs", "regex", id="broken-pattern"),
        pytest.param(OneOf(()), "structured_outputs", "choices", id="no-choices"),
        pytest.param(Lark("start: nobody"), "structured_outputs", "nobody", id="unknown-rule"),
        pytest.param(JsonSchema(False), "response_format", "false", id="schema-false"),
        pytest.param(JsonSchema([1]), "response_format", "schema", id="no-schema"),
        pytest.param(JsonSchema({"type": "strin"}), "response_format", "strin", id="unknown-type"),
        pytest.param(
            JsonSchema({"not": {"type": "string"}}), "response_format", "not", id="unsupported"
        ),
    ],
)
def test_what_cannot_be_a_grammar_is_named(asked: Form, param: str, complaint: str) -> None:
    """The client learns the parameter and the reason."""
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        form(asked)

    assert caught.value.param == param


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(Regex("a("), id="pattern"),
        pytest.param(Lark("start: " + "nobody " * 200), id="grammar"),
        pytest.param(JsonSchema({"type": "x" * 1000}), id="schema"),
        pytest.param(JsonSchema({"pattern": "(?=a)"}), id="schema-s-pattern"),
    ],
)
def test_a_refusal_tells_of_what_was_sent_not_of_our_grammar(asked: Form) -> None:
    """Nobody sent rules called thought and form."""
    with pytest.raises(InvalidRequest) as caught:
        form(asked, is_reasoning=True)

    assert len(str(caught.value)) < 240
    assert not any(word in str(caught.value) for word in ("start:", "thought", "x-guidance", " | "))


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        pytest.param(chat(Named("nobody")), "tool_choice", id="an-unknown-tool"),
        pytest.param(Chat([], [], "required"), "tool_choice", id="no-tools"),
        pytest.param(chat("required", **{"a<b": {}}), "tools", id="a-name-with-markup"),
        pytest.param(
            chat("required", f={"properties": {" a": {}}}), "tools", id="a-key-with-a-blank"
        ),
        pytest.param(
            chat("required", f={"properties": {f"p{i}": {} for i in range(2000)}}),
            "tools",
            id="too-many-arguments",
        ),
    ],
)
def test_a_choice_that_cannot_be_met_is_named(asked: Chat, param: str) -> None:
    """Better now than an answer without the call."""
    with pytest.raises(InvalidRequest) as caught:
        forced(asked)

    assert caught.value.param == param


def test_a_schema_of_a_tool_is_a_hint_where_it_goes_beyond_what_is_known() -> None:
    """Real tools declare formats and keywords of every kind."""
    schema = {"type": "integer", "format": "nanoseconds", "not": {"const": 3}}
    parameters = {"properties": {"a": schema, "b": {"$ref": "#/properties/a"}}}
    argument = "<arg_key>b</arg_key><arg_value>4</arg_value>"

    assert fits(forced(chat("required", f=parameters)), f"<tool_call>f{argument}</tool_call>")
