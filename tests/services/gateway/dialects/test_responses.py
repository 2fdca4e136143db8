"""What POST /v1/responses accepts, and what it asks for."""

import json
from typing import Any

import pytest

from services.gateway.ask import Ask, Chat, JsonObject, JsonSchema, Named
from services.gateway.dialects.responses import echoed, read
from services.gateway.failures import InvalidRequest

GET: dict[str, Any] = {"type": "function", "name": "get", "parameters": {"type": "object"}}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [{"type": "function", "name": "stop", "parameters": {}}],
}
SEARCH = {"type": "web_search", "external_web_access": False}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": "Hi", **fields}).encode()


def ask(**fields: Any) -> Ask:
    return read(body(**fields)).ask()


def chat(**fields: Any) -> Chat:
    prompt = ask(**fields).prompts[0]
    assert isinstance(prompt, Chat)
    return prompt


def names(found: Chat) -> list[str]:
    return [tool["function"]["name"] for tool in found.tools]


def test_the_text_s_format_comes_back_whole() -> None:
    """A client's library needs its name."""
    text_format = {
        "type": "json_schema",
        "name": "answer",
        "description": "What is said.",
        "strict": True,
        "schema": {"type": "object"},
    }

    assert echoed(read(body(text={"format": text_format})))["text"]["format"] == text_format


def test_every_wish_is_passed_on() -> None:
    """One by one."""
    found = ask(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        priority=2,
        cache_salt="s",
        prompt_cache_key="k",
        top_logprobs=3,
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
    )

    wishes, prompt = found.wishes, found.prompts[0]
    assert isinstance(prompt, Chat)
    assert (wishes.max_new_tokens, wishes.temperature, wishes.top_p) == (9, 0.5, 0.9)
    assert wishes.num_logprobs == 3
    assert (found.is_stream, found.priority, found.cache_salt) == (True, 2, "s")
    assert found.session == "k"
    assert prompt.template_options == {"reasoning_effort": "low"}
    assert not prompt.is_parallel


def test_no_effort_is_no_thinking() -> None:
    """The template's switch."""
    assert chat(reasoning={"effort": "none"}).template_options == {"enable_thinking": False}


def test_logprobs_are_given_to_who_includes_them() -> None:
    """Also without alternatives."""
    assert ask().wishes.num_logprobs is None
    assert ask(include=["message.output_text.logprobs"]).wishes.num_logprobs == 0


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, JsonObject()),
        ({"type": "json_schema", "name": "x", "schema": {"a": 1}}, JsonSchema({"a": 1})),
    ],
)
def test_text_format_is_the_form(given: Any, form: Any) -> None:
    """All three."""
    assert ask(text={"format": given}).form == form


def test_codex_s_tools_are_taken() -> None:
    """Functions, namespaces of them, and a search that permits but demands nothing."""
    found = chat(tools=[GET, AGENTS, SEARCH])

    assert names(found) == ["get", "agents.stop"]
    told = echoed(read(body(tools=[GET, AGENTS, SEARCH])))
    assert [tool["type"] for tool in told["tools"]] == ["function", "namespace"]


@pytest.mark.parametrize(
    ("given", "choice", "offered"),
    [
        ("auto", "auto", ["get", "agents.stop"]),
        ("none", "auto", []),
        ("required", "required", ["get", "agents.stop"]),
        ({"type": "function", "name": "get"}, Named("get"), ["get", "agents.stop"]),
        (
            {"type": "function", "name": "stop", "namespace": "agents"},
            Named("agents.stop"),
            ["get", "agents.stop"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get"}],
            },
            "required",
            ["get"],
        ),
    ],
)
def test_tool_choice(given: Any, choice: Any, offered: list[str]) -> None:
    """All its forms."""
    found = chat(tools=[GET, AGENTS], tool_choice=given)

    assert found.tool_choice == choice
    assert names(found) == offered


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": None}, "input", "valid list"),
        ({"previous_response_id": "r"}, "previous_response_id", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"truncation": "auto"}, "truncation", 'only "disabled" is'),
        ({"include": ["odd"]}, "include", "'odd' is not supported"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools", "'code_interpreter' tools are not"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools", "'custom' tools are not"),
        ({"tools": [{"type": "function"}]}, "tools", "needs a name"),
        ({"tools": [{**AGENTS, "tools": [AGENTS]}]}, "tools", "holds functions only"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "required", "tools": [SEARCH]}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "'function' or 'allowed_tools'"),
        ({"text": {"verbosity": "low"}}, "text", "medium"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema is missing"),
        ({"reasoning": {"mode": "pro"}}, "reasoning", "standard"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
    ],
)
def test_what_is_not_served_is_named(fields: Any, param: str, words: str) -> None:
    """A known field whose meaning is not supported never passes in silence."""
    with pytest.raises(InvalidRequest, match=words) as refused:
        ask(**fields)

    assert refused.value.param == param


def test_what_has_no_meaning_here_is_ignored() -> None:
    """Codex and the SDK send these."""
    extra: dict[str, Any] = {
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "client_metadata": {},
        "stream_options": {"include_obfuscation": False},
        "metadata": {"a": "b"},
        "user": "u",
        "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    }

    assert ask(**extra) == ask()


@pytest.mark.parametrize("choice", ["none", {"type": "function", "name": "get"}, None])
def test_a_response_tells_the_tool_choice_as_it_came(choice: Any) -> None:
    """A word stays a word."""
    assert echoed(read(body(tools=[GET], tool_choice=choice)))["tool_choice"] == (choice or "auto")


def test_a_response_says_that_nothing_is_stored() -> None:
    """Whatever was asked."""
    assert echoed(read(body(store=True)))["store"] is False


def test_millions_of_items_are_refused() -> None:
    """Before each is looked at."""
    with pytest.raises(InvalidRequest, match="more than 16384"):
        read(body(input=[{"role": "user", "content": ""}] * 20_000))
    parts = [{"type": "input_text", "text": ""}] * 20_000
    with pytest.raises(InvalidRequest, match="more than 16384"):
        read(body(input=[{"type": "function_call_output", "call_id": "a", "output": parts}]))
