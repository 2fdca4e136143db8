"""How much a request may hold, counted on plain JSON data before anything is checked or rendered.

A refusal must come within a second, and a body of 32 MB can hold millions of small things. What
fits into a context is far below these bounds; lengths of text are judged where tokens are known.
"""

from typing import Any

from services.gateway.failures import TOO_LONG, InvalidRequest

MAX_ITEMS = 16384  # messages, their parts and calls: checked and rendered within half a second
MAX_VALUES = 65536  # in one document, or in calls' arguments: rendered within half a second
# Fields that hold JSON of any shape, which is rendered, compiled or told again.
_DOCUMENTS = (
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "text",
    "output_config",
    "output_format",
    "chat_template_kwargs",
    "metadata",
)
_LISTS = ("content", "tool_calls", "output", "summary")  # where messages and items hold others
MAX_PROMPT_TOKENS = 1 << 21  # beyond any model's context: checked within half a second


def refuse_endless(fields: dict[str, Any]) -> None:
    """Raise InvalidRequest for a body with more than can be looked at in time."""
    for name in ("messages", "input", "system"):
        num_items, num_in_calls = _num_items(fields.get(name))
        if num_items > MAX_ITEMS:
            raise InvalidRequest(
                f"{name}: more than {MAX_ITEMS} messages, content parts and tool calls",
                param=name,
                code="invalid_value",
            )
        refuse_many_values(num_in_calls, f"{name}: tool inputs", name)
    for name in _DOCUMENTS:
        refuse_many_values(num_values(fields.get(name)), name, name)
    num_prompt_items = _num_prompt_items(fields.get("prompt"))
    if num_prompt_items > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"the prompt has {num_prompt_items} tokens, more than any model's context",
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


def _num_prompt_items(prompt: Any) -> int:
    """Tokens of one prompt or of several together; of texts, how many."""
    if not isinstance(prompt, list):
        return 0
    if len(prompt) > MAX_PROMPT_TOKENS or (prompt and not isinstance(prompt[0], list)):
        return len(prompt)
    return len(prompt) + sum(len(each) for each in prompt if isinstance(each, list))


def _num_items(items: Any) -> tuple[int, int]:
    """Items at any depth, and values within calls' inputs; counting ends beyond either bound."""
    waiting, num_found, num_in_calls = [items], 0, 0
    while waiting and num_found <= MAX_ITEMS and num_in_calls <= MAX_VALUES:
        held = waiting.pop()
        if not isinstance(held, list):
            continue
        num_found += len(held)
        if num_found > MAX_ITEMS:
            break
        for item in held:
            if isinstance(item, dict):
                waiting.extend(item[name] for name in _LISTS if name in item)
                num_in_calls += num_values(item.get("input"))
    return num_found, num_in_calls
