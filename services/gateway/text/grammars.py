"""What an answer must be, as a grammar that workers mask tokens by: llguidance's dialect of Lark.

Pure. A thought comes first where the prompt ends within one; it is any text, but holds no markers.
Arguments of calls stand in their schema's order. A string among them is any text, or one of its
enum; other values are JSON of their schema.
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
from services.gateway.text.schema_types import SchemaTypes
from shared import grammar
from shared.errors import BadRequest

MAX_PROPERTIES = 1500  # of all schemas of one request: compiled within half a second
MAX_CHOICES = 10_000

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
    rules: list[str] = []
    starts: list[str] = []
    if form is not None and not is_forced:
        rules += _form_rules(form)
        starts.append("form")
    if chat is not None and tools:
        is_one = not chat.is_parallel or isinstance(chat.tool_choice, Named)
        rules += _call_rules(tools, is_one=is_one)
        starts.append("calls")
    thought = "thought " if is_reasoning else ""
    if is_reasoning:
        rules.append(f"thought[lazy]: {_any_but(CALL_START) if tools else '/(?s:.*)/'}")
        rules[-1] += f" {_literal(THINK_END)}"
    text = "\n".join([f"start: {thought}({' | '.join(starts)})", *rules])
    if isinstance(form, Lark) and starts == ["form"] and not is_reasoning:
        text = form.grammar
    _check(text, _parameter(form if "form" in starts else None))
    return text


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
            return [f"form: {_json(shape, _JSON_STYLE)}"]
        case Regex(pattern):
            if not pattern:
                raise _invalid("the pattern is empty", "structured_outputs")
            return ["form: PATTERN", f"PATTERN: /{_slashed(pattern)}/"]
        case OneOf(choices):
            if not choices or not all(choices) or len(choices) > MAX_CHOICES:
                raise _invalid(
                    f"1 to {MAX_CHOICES} choices, none of them empty", "structured_outputs"
                )
            return ["form: CHOICE", f"CHOICE: {' | '.join(map(_literal, choices))}"]
        case Lark(text):
            return [f"form: %lark {{\n{text}\n}}"]


def _call_rules(tools: Mapping[str, SchemaTypes], *, is_one: bool) -> list[str]:
    _refuse_large([tool.schema for tool in tools.values()], "tools")
    names = " | ".join(f"tool_{place}" for place in range(len(tools)))
    rules = [
        "calls: call" if is_one else "calls: call (newline call)*",
        f"call: {_literal(CALL_START)} ({names}) {_literal(CALL_END)}",
        f"raw[lazy]: {_any_but(CALL_END)} {_literal(VALUE_END)}",
        _NEWLINE,
    ]
    for place, (name, tool) in enumerate(tools.items()):
        rules += _tool_rules(f"tool_{place}", name, tool)
    return rules


def _tool_rules(rule: str, name: str, tool: SchemaTypes) -> list[str]:
    """How one tool is called: those arguments that are declared, or any where none is."""
    needed, declared = tool.required, tool.properties
    if not declared and tool.schema.get("additionalProperties") not in (None, False):
        key = f"/[^<]+/ {_literal(KEY_END)} newline {_literal(VALUE_START)}"
        value = _value(tool.schema["additionalProperties"], tool, tool.of_argument(""))
        return [
            f"{rule}: {_literal(_speakable(name))} newline ({rule}_any)*",
            f"{rule}_any: {_literal(KEY_START)} {key} {value} newline",
        ]
    usual = {key: schema for key, schema in declared.items() if schema is not False}
    arguments = [
        f"{rule}_{place}" + ("" if key in needed else "?") for place, key in enumerate(usual)
    ]
    rules = [f"{rule}: {_literal(_speakable(name))} newline {' '.join(arguments)}"]
    for place, (key, schema) in enumerate(usual.items()):
        spoken = _literal(f"{KEY_START}{_speakable(key)}{KEY_END}")
        value = _value(schema, tool, tool.of_argument(key))
        rules.append(f"{rule}_{place}: {spoken} newline {_literal(VALUE_START)} {value} newline")
    return rules


def _value(schema: Any, tool: SchemaTypes, types: frozenset[str]) -> str:
    """An argument's value with its end marker."""
    if "string" not in types:
        shape = schema if isinstance(schema, dict) else {}
        return f"{_json(_with_references(shape, tool.schema), _TOOL_STYLE)} {_literal(VALUE_END)}"
    choices = schema.get("enum") if isinstance(schema, dict) and types == {"string"} else None
    if choices:
        return f"({' | '.join(map(_literal, choices))}) {_literal(VALUE_END)}"
    return "raw"


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
    return rf"(/(?s:.*)/ & ~/(?s:.*){_slashed(re.escape(marker))}(?s:.*)/)"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    """The pattern as it may stand between slashes on one line."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda part: written.get(part[0], part[0]), pattern, flags=re.S)


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


def _parameter(form: Form | None) -> str:
    if form is None:
        return "tools"
    return "response_format" if isinstance(form, JsonObject | JsonSchema) else "structured_outputs"


def _check(text: str, param: str) -> None:
    try:
        grammar.check(text)
    except BadRequest as error:
        raise _invalid(str(error), param) from None


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")
