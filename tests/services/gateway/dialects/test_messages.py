"""What POST /v1/messages accepts, and what it asks for."""

import json
from typing import Any

import pytest

from services.gateway.ask import Ask, Chat, JsonSchema, Named
from services.gateway.dialects.messages import read, read_count
from services.gateway.failures import InvalidRequest

TOOL: dict[str, Any] = {"name": "get", "input_schema": {"type": "object"}}


def body(**fields: Any) -> bytes:
    base = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({**base, **fields}).encode()


def ask(**fields: Any) -> Ask:
    return read(body(**fields)).ask()


def chat(**fields: Any) -> Chat:
    prompt = ask(**fields).prompts[0]
    assert isinstance(prompt, Chat)
    return prompt


def test_every_wish_is_passed_on() -> None:
    """One by one."""
    found = ask(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["END"],
        stream=True,
        priority=-1,
        cache_salt="s",
    )

    wishes = found.wishes
    assert wishes.max_new_tokens == 5
    assert (wishes.temperature, wishes.top_p, wishes.top_k) == (0.5, 0.9, 7)
    assert wishes.stops == ("END",)
    assert (found.is_stream, found.priority, found.cache_salt) == (True, -1, "s")


def test_tools_are_offered_in_the_template_s_form() -> None:
    """Their schema is what templates call parameters."""
    tool = {**TOOL, "description": "Gets.", "type": "custom", "cache_control": {}}

    assert chat(tools=[tool]).tools == [
        {
            "type": "function",
            "function": {"name": "get", "description": "Gets.", "parameters": {"type": "object"}},
        }
    ]


def test_who_asks_for_a_thread_is_told_how_to_go_on() -> None:
    """By these words Anthropic's tool runner goes on without one."""
    with pytest.raises(InvalidRequest, match="thread is not supported") as caught:
        ask(thread={"type": "create"})

    assert caught.value.details == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


@pytest.mark.parametrize(
    ("given", "choice", "num_tools", "is_parallel"),
    [
        (None, "auto", 1, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", 1, False),
        ({"type": "any"}, "required", 1, True),
        ({"type": "tool", "name": "get"}, Named("get"), 1, True),
        ({"type": "none"}, "auto", 0, True),
    ],
)
def test_tool_choice(given: Any, choice: Any, num_tools: int, is_parallel: bool) -> None:
    """All four forms."""
    found = chat(tools=[TOOL], tool_choice=given)

    assert found.tool_choice == choice
    assert len(found.tools) == num_tools
    assert found.is_parallel == is_parallel


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_and_effort_are_the_template_s_options(fields: Any, options: Any) -> None:
    """Where the client is silent the checkpoint decides."""
    assert chat(**fields).template_options == options


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_schema_is_a_form(name: str) -> None:
    """Under its new name and its old one."""
    schema = {"type": "json_schema", "schema": {"type": "object"}}

    found = ask(**{name: {"format": schema} if name == "output_config" else schema})

    assert found.form == JsonSchema({"type": "object"})


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("all", ["a", "b"]), (None, ["b"]), ({"type": "thinking_turns", "value": 1}, ["b"])],
)
def test_clearing_thinking_is_done(keep: Any, kept: list[str]) -> None:
    """Claude Code asks for it after a pause."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]},
        {"role": "user", "content": "Ho"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}]},
        {"role": "user", "content": "He"},
    ]
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})

    found = chat(messages=messages, context_management={"edits": [edit]})

    assert [
        turn["reasoning_content"] for turn in found.messages if "reasoning_content" in turn
    ] == kept


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "prefilling"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools", "web_search_20250305"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "'x'"),
        ({"stop_sequences": [""]}, "stop_sequences", "1 to 1000"),
        ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
        ({"thinking": {"type": "between_tools"}}, "thinking", "'disabled'"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
        ({"container": "c"}, "container", "not supported"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
            "clear_tool_uses_20250919",
        ),
    ],
)
def test_what_is_not_served_is_named(fields: Any, param: str, words: str) -> None:
    """A known field whose meaning is not supported never passes in silence."""
    with pytest.raises(InvalidRequest, match=words) as refused:
        ask(**fields)

    assert refused.value.param == param


def test_unknown_fields_are_ignored() -> None:
    """Clients send many."""
    assert ask(betas=["x"], diagnostics={}, service_tier="auto", metadata={"user_id": "u"}) == ask()


def test_a_count_needs_no_max_tokens() -> None:
    """Nothing is generated."""
    fields = json.loads(body())
    del fields["max_tokens"]

    assert read_count(json.dumps(fields).encode()).chat() == chat()


def test_millions_of_small_things_are_refused() -> None:
    """Before each is looked at."""
    blocks = [{"type": "text", "text": ""}] * 20_000
    huge = {"type": "tool_use", "id": "a", "name": "b", "input": {str(n): n for n in range(70_000)}}

    for content in (blocks, [{"type": "tool_result", "tool_use_id": "a", "content": blocks}]):
        with pytest.raises(InvalidRequest, match="more than 16384"):
            read(body(messages=[{"role": "user", "content": content}]))
    with pytest.raises(InvalidRequest, match="more than 16384"):
        read(body(system=blocks))
    with pytest.raises(InvalidRequest, match="more than 65536"):
        read(body(messages=[{"role": "assistant", "content": [huge]}]))
