"""How much a request may hold, counted on plain JSON data before anything is checked or rendered.

A refusal must come within a second, and a body of 32 MB can hold millions of small things. What
fits into a context is far below these bounds; lengths of text are judged where tokens are known.
"""

from typing import Any

from services.gateway.failures import TOO_LONG, InvalidRequest

MAX_ITEMS = 16384  # messages, their parts and calls: checked and rendered within half a second
MAX_VALUES = 65536  # in tools' schemas, or in calls' arguments: rendered within half a second
MAX_PROMPT_TOKENS = 1 << 21  # beyond any model's context: checked within half a second


def refuse_endless(fields: dict[str, Any]) -> None:
    """Raise InvalidRequest for a body with more than can be looked at in time."""
    num_items = _num_items(fields.get("messages"))
    if num_items > MAX_ITEMS:
        raise InvalidRequest(
            f"messages: more than {MAX_ITEMS} messages, content parts and tool calls",
            param="messages",
            code="invalid_value",
        )
    refuse_many_values(num_values(fields.get("tools")), "tools", "tools")
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, more than any model's context",
            param="prompt",
            code=TOO_LONG,
        )


def refuse_many_values(num_found: int, where: str, param: str) -> None:
    """Raise InvalidRequest if these are too many values."""
    if num_found > MAX_VALUES:
        raise InvalidRequest(
            f"{where}: more than {MAX_VALUES} values", param=param, code="invalid_value"
        )


def num_values(document: Any) -> int:
    """How many values lie within a JSON document, at any depth; counting ends beyond MAX_VALUES."""
    waiting, num_found = [document], 0
    while waiting and num_found <= MAX_VALUES:
        value = waiting.pop()
        if isinstance(value, dict | list):
            num_found += len(value)
            if num_found <= MAX_VALUES:
                waiting.extend(value.values() if isinstance(value, dict) else value)
    return num_found


def _num_items(messages: Any) -> int:
    if not isinstance(messages, list) or len(messages) > MAX_ITEMS:
        return len(messages) if isinstance(messages, list) else 0
    lists = (
        message.get(name)
        for message in messages
        if isinstance(message, dict)
        for name in ("content", "tool_calls")
    )
    return len(messages) + sum(len(each) for each in lists if isinstance(each, list))
