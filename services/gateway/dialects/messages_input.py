"""Anthropic's conversation: the shapes of its messages, and the turns that templates take."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from services.gateway.ask import Json
from services.gateway.dialects.sealed import unseal
from services.gateway.dialects.shapes import Shape, word_or

# What each kind of block cannot be without.
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "image": (),
    "document": (),
    "search_result": (),
}
_SHOWN = (
    "text",
    "image",
    "document",
    "search_result",
)  # templates tell that all but text is unread
_ROLES = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}
_BILLING = "x-anthropic-billing-header:"  # Claude Code's note to its vendor, not to the model


class Block(Shape):
    """A part of a message; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "Blocks | None" = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Block":
        needed = _NEEDED.get(self.type)
        if needed is None:
            raise ValueError(f"{self.type!r} blocks are not supported")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"a {self.type} block needs {name}")
        for block in self.content or ():
            if block.type not in _SHOWN:
                raise ValueError(f"a {self.type} block has no {block.type} blocks in it")
        return self

    def shown(self) -> Json:
        """The block as a part that templates take."""
        return {"type": "text", "text": self.text} if self.type == "text" else {"type": self.type}


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Blocks = Annotated[list[Block], Field(fail_fast=True), word_or(list[Block], _as_blocks)]


class Turn(Shape):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> "Turn":
        for block in self.content:
            role = _ROLES.get(block.type, self.role)
            if role != self.role:
                raise ValueError(f"a {self.role} message has no {block.type} blocks")
        return self


def conversation(system: list[Block] | None, messages: list[Turn]) -> list[Json]:
    """The turns that templates take: tool results become turns of their own."""
    turns: list[Json] = []
    kept = [block.shown() for block in system or () if not (block.text or "").startswith(_BILLING)]
    if kept:
        turns.append({"role": "system", "content": _content(kept)})
    for message in messages:
        turns += _assistant(message) if message.role == "assistant" else _told(message)
    return turns


def without_old_thinking(turns: list[Json], num_kept: int) -> list[Json]:
    """The turns, with the thinking of all but the last num_kept that have some left out."""
    thinking = [place for place, turn in enumerate(turns) if "reasoning_content" in turn]
    dropped = set(thinking[: max(0, len(thinking) - num_kept)])
    return [
        {name: value for name, value in turn.items() if name != "reasoning_content"}
        if place in dropped
        else turn
        for place, turn in enumerate(turns)
    ]


def _assistant(message: Turn) -> list[Json]:
    """One turn. What the thinking block left out for the client's sake is in its signature."""
    blocks = message.content
    turn: Json = {"role": "assistant"}
    thoughts = [
        block.thinking or unseal(block.signature or "") or ""
        for block in blocks
        if block.type == "thinking"
    ]
    if any(thoughts):
        turn["reasoning_content"] = "".join(thoughts)
    turn["content"] = "".join(block.text or "" for block in blocks if block.type == "text")
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _told(message: Turn) -> list[Json]:
    """A user's or system's message: its tool results, and what stands between them, in order."""
    turns: list[Json] = []
    shown: list[Json] = []
    for block in message.content:
        if block.type in _SHOWN:
            shown.append(block.shown())
            continue
        if shown:
            turns.append({"role": message.role, "content": _content(shown)})
            shown = []
        turns.append(
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": _content([part.shown() for part in block.content or ()]),
            }
        )
    if shown or not turns:
        turns.append({"role": message.role, "content": _content(shown)})
    return turns


def _content(parts: list[Json]) -> str | list[Json]:
    """A lone text is text: templates may treat lists in their own way."""
    if not parts:
        return ""
    only = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else None
    return parts if only is None else str(only)
