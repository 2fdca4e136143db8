"""What an answer must be, as a grammar that workers mask tokens by: llguidance's dialect of Lark.

Pure. A thought comes first where the prompt ends within one; it is any text, but holds no markers.
Arguments of calls stand in their schema's order. A string among them is what raw_values says; other
values are JSON of their schema.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.ask import (
    Chat,
    Form,
    JsonObject,
    JsonSchema,
    Lark,
    Named,
    OneOf,
    Regex,
)
from services.gateway.failures import InvalidRequest
from services.gateway.text.calls import (
    CALL_END,
    CALL_START,
    KEY_END,
    KEY_START,
    VALUE_END,
    VALUE_START,
)
from services.gateway.text.glm import THINK_END
from services.gateway.text.raw_values import expression, literal, raw_texts, slashed
from services.gateway.text.schema_keywords import kept_schema, without_patterns
from services.gateway.text.schema_types import SchemaTypes
from shared import grammar
from shared.errors import BadRequest

MAX_PROPERTIES = 1500  # of all schemas of one request: compiled within half a second
MAX_CHOICES = 10_000
_LONGEST_REASON = 200

# A space, or a new line and its indentation: without a bound a model may go on with it for ever.
_JSON_STYLE = {"whitespace_pattern": r"( |\n {0,16})", "coerce_one_of": True}
_TOOL_STYLE = {**_JSON_STYLE, "lenient": True}  # tools' schemas are hints where they go beyond us
_NEWLINE = 'newline: "\\n"?'  # either form of the markup


def grammar_of(form: Form | None, chat: Chat | None, *, is_reasoning: bool) -> str | None:
    """The grammar of an answer, None where any text will do. Up to a second: run it in a thread.

    `is_reasoning`: the prompt ends within a thought. Raises InvalidRequest for what is no schema,
    pattern or grammar, is too large, or cannot be told as a grammar.
    """
    tools = _tools(chat)
    is_forced = chat is not None and chat.tool_choice != "auto"
    if form is None and not is_forced:
        return None
    bound = None if is_forced else form
    if chat is None or not tools:
        text = _text(bound, [], is_reasoning=is_reasoning)
        _check(text, bound)
        return text
    is_one = not chat.is_parallel or isinstance(chat.tool_choice, Named)
    calls = _call_rules(tools, is_one=is_one, keeps_patterns=True)
    text = _text(bound, calls, is_reasoning=is_reasoning)
    try:
        _check(text, bound)
    except InvalidRequest:
        # Tools' schemas are hints where they go beyond us; a pattern may.
        calls = _call_rules(tools, is_one=is_one, keeps_patterns=False)
        text = _text(bound, calls, is_reasoning=is_reasoning)
        _check(text, bound)
    return text


def _text(form: Form | None, calls: Sequence[str], *, is_reasoning: bool) -> str:
    """The whole grammar; without `calls` none can be made."""
    if isinstance(form, Lark) and not calls and not is_reasoning:
        return form.grammar
    starts = ["form"] * (form is not None) + ["calls"] * bool(calls)
    rules = [*(_form_rules(form) if form is not None else ()), *calls]
    thought = ""
    if is_reasoning:
        thought = "thought "
        any_thought = _any_but(CALL_START) if calls else "/(?s:.*)/"
        rules.append(f"thought[lazy]: {any_thought} {literal(THINK_END)}")
    return "\n".join([f"start: {thought}({' | '.join(starts)})", *rules])


def _tools(chat: Chat | None) -> dict[str, SchemaTypes]:
    """The tools that may be called, by name."""
    if chat is None:
        return {}
    functions = [tool["function"] for tool in chat.tools]
    if isinstance(chat.tool_choice, Named):
        name = chat.tool_choice.name
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise _invalid(f"there is no tool {name!r} to call", "tool_choice")
    if chat.tool_choice == "required" and not functions:
        raise _invalid("a call is required, but no tools are offered", "tool_choice")
    return {
        function["name"]: SchemaTypes(function.get("parameters") or {}) for function in functions
    }


def _form_rules(form: Form) -> list[str]:
    match form:
        case JsonObject():
            return [f"form: {_json({'type': 'object'}, _JSON_STYLE)}"]
        case JsonSchema(schema):
            if schema is False:
                raise _invalid("no answer is of the schema false", "response_format")
            shape = {} if schema is True else schema
            if not isinstance(shape, dict):
                raise _invalid("a schema is an object, true or false", "response_format")
            _refuse_large([shape], "response_format")
            return [f"form: {_json(kept_schema(shape), _JSON_STYLE)}"]
        case Regex(pattern):
            if not pattern:
                raise _invalid("the pattern is empty", "structured_outputs")
            return ["form: PATTERN", f"PATTERN: /{slashed(pattern)}/"]
        case OneOf(choices):
            if not choices or not all(choices) or len(choices) > MAX_CHOICES:
                raise _invalid(
                    f"1 to {MAX_CHOICES} choices, none of them empty", "structured_outputs"
                )
            return ["form: CHOICE", f"CHOICE: {' | '.join(map(literal, choices))}"]
        case Lark(text):
            return [f"form: %lark {{\n{text}\n}}"]


def _call_rules(
    tools: Mapping[str, SchemaTypes], *, is_one: bool, keeps_patterns: bool
) -> list[str]:
    _refuse_large([tool.schema for tool in tools.values()], "tools")
    names = " | ".join(f"tool_{place}" for place in range(len(tools)))
    rules = [
        "calls: call" if is_one else "calls: call (newline call)*",
        f"call: {literal(CALL_START)} ({names}) {literal(CALL_END)}",
        f"raw[lazy]: {_any_but(CALL_END)} {literal(VALUE_END)}",
        _NEWLINE,
    ]
    for place, (name, tool) in enumerate(tools.items()):
        rules += _tool_rules(f"tool_{place}", name, tool, keeps_patterns=keeps_patterns)
    return rules


def _tool_rules(rule: str, name: str, tool: SchemaTypes, *, keeps_patterns: bool) -> list[str]:
    """How one tool is called: those arguments that are declared, or any where none is."""
    needed, declared = tool.required, tool.properties
    if not declared and tool.schema.get("additionalProperties") not in (None, False):
        key = f"/[^<]+/ {literal(KEY_END)} newline {literal(VALUE_START)}"
        schema, types = tool.schema["additionalProperties"], tool.of_argument("")
        return [
            f"{rule}: {literal(_speakable(name))} newline ({rule}_any)*",
            f"{rule}_any: {literal(KEY_START)} {key} {rule}_value newline",
            _value_rule(f"{rule}_value", schema, tool, types, keeps_patterns=keeps_patterns),
        ]
    usual = {key: schema for key, schema in declared.items() if schema is not False}
    arguments = [
        f"{rule}_{place}" + ("" if key in needed else "?") for place, key in enumerate(usual)
    ]
    rules = [f"{rule}: {literal(_speakable(name))} newline {' '.join(arguments)}"]
    for place, (key, schema) in enumerate(usual.items()):
        spoken = literal(f"{KEY_START}{_speakable(key)}{KEY_END}")
        own, types = f"{rule}_{place}", tool.of_argument(key)
        rules += [
            f"{own}: {spoken} newline {literal(VALUE_START)} {own}_value newline",
            _value_rule(f"{own}_value", schema, tool, types, keeps_patterns=keeps_patterns),
        ]
    return rules


def _value_rule(
    rule: str, schema: Any, tool: SchemaTypes, types: frozenset[str], *, keeps_patterns: bool
) -> str:
    """An argument's value with its end marker."""
    end = literal(VALUE_END)
    if "string" not in types:
        shape = schema if isinstance(schema, dict) else {}
        whole = _with_references(shape, tool.schema)
        kept = whole if keeps_patterns else without_patterns(whole)
        return f"{rule}: {_json(kept, _TOOL_STYLE)} {end}"
    texts = raw_texts(schema, tool.schema, types, keeps_patterns=keeps_patterns)
    if texts is None:
        return f"{rule}: raw"
    if isinstance(texts, tuple):
        return f"{rule}: ({expression(texts)}) {end}"
    return f"{rule}[lazy]: (({expression(texts)}) & {_without(VALUE_END)}) {end}"


def _with_references(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as one of its own, with the root that its references are relative to."""
    text = json.dumps(schema)
    if '"$ref"' not in text:
        return schema
    whole = json.dumps({**schema, "$defs": {"root": root}})
    found: dict[str, Any] = json.loads(whole.replace('"$ref": "#', '"$ref": "#/$defs/root'))
    return found


def _json(schema: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': style})}"


def _any_but(marker: str) -> str:
    """Any text without this marker."""
    return f"(/(?s:.*)/ & {_without(marker)})"


def _without(marker: str) -> str:
    return rf"~/(?s:.*){slashed(re.escape(marker))}(?s:.*)/"


def _speakable(name: str) -> str:
    """A tool's or argument's name. Raises InvalidRequest if markup cannot tell it."""
    if not name or "<" in name or name != name.strip():
        raise _invalid(
            f"{name!r} cannot be told in a call: it is blank at an end or has a '<'", "tools"
        )
    return name


def _refuse_large(schemas: Sequence[Mapping[str, Any]], param: str) -> None:
    num_properties = sum(map(_num_properties, schemas))
    if num_properties > MAX_PROPERTIES:
        raise _invalid(f"more than {MAX_PROPERTIES} properties in schemas", param)


def _num_properties(schema: Any) -> int:
    return sum(
        len(value["properties"])
        for value in _values(schema)
        if isinstance(value, dict) and isinstance(value.get("properties"), dict)
    )


def _values(document: Any) -> Iterator[Any]:
    waiting = [document]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)


def _check(text: str, form: Form | None) -> None:
    """Raise InvalidRequest, in words about what the client sent, for a grammar of no use."""
    try:
        grammar.check(text)
    except BadRequest as error:
        what, param = _asked(form)
        raise _invalid(f"{what} cannot be kept: {_reason(str(error))}", param) from None


def _asked(form: Form | None) -> tuple[str, str]:
    """What the client calls it, and the parameter that it came in."""
    match form:
        case None:
            return "the tools' schemas", "tools"
        case JsonObject() | JsonSchema():
            return "the schema", "response_format"
        case Regex():
            return "the pattern", "structured_outputs"
        case OneOf():
            return "the choices", "structured_outputs"
        case Lark():
            return "the grammar", "structured_outputs"


def _reason(complaint: str) -> str:
    """The library's reason without our grammar's text, and places in it."""
    found = complaint.removeprefix("the grammar cannot be used: ")
    found = re.split(r" \d+ \| ", found, maxsplit=1)[0]
    found = re.sub(r"^(at )?\d+\(\d+\): ", "", found)
    found = found.removeprefix("failed to compile JSON schema: ")
    return found[:_LONGEST_REASON]


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")
