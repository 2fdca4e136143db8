"""The Responses API's conversation: the shapes of its items, and the turns that templates take."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from services.gateway.ask import Json
from services.gateway.dialects.bounds import num_values, refuse_many_values
from services.gateway.dialects.chat import call_arguments
from services.gateway.dialects.sealed import unseal
from services.gateway.dialects.shapes import Shape, word_or
from services.gateway.failures import InvalidRequest

# What each kind of item cannot be without.
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_MEDIA = {
    "input_image": "image",
    "input_file": "file",
    "input_audio": "audio",
    "input_video": "video",
}
_ROLES = ("user", "assistant", "system", "developer")


class Part(Shape):
    """A part of an item; the model reads text, and the template says so of other parts."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Part":
        if self.type in _TEXTS and self.text is None:
            raise ValueError(f"{self.type} parts need text")
        if self.type == "refusal" and self.refusal is None:
            raise ValueError("refusal parts need refusal")
        if self.type not in (*_TEXTS, *_MEDIA, "refusal"):
            raise ValueError(f"{self.type!r} parts are not supported")
        return self

    @property
    def words(self) -> str:
        """The text that it has."""
        return self.text or self.refusal or ""

    def shown(self) -> Json:
        """The part as templates take it."""
        if self.type in _MEDIA:
            return {"type": _MEDIA[self.type]}
        return {"type": "text", "text": self.words}


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[list[Part], Field(fail_fast=True), word_or(list[Part], _as_parts)]


class Item(Shape):
    """An item of the input; which fields it has depends on its type."""

    type: str = "message"
    role: str | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Item":
        needed = _NEEDED.get(self.type)
        if needed is None:
            raise ValueError(f"{self.type!r} items are not supported")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"a {self.type} item needs {name}")
        if self.type == "message" and self.role not in _ROLES:
            raise ValueError(f"the role is one of {', '.join(_ROLES)}")
        return self


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


Items = Annotated[list[Item], Field(fail_fast=True, min_length=1), word_or(list[Item], _as_items)]


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool."""
    return f"{namespace}.{name}" if namespace else name


def conversation(instructions: str | None, items: list[Item]) -> list[Json]:
    """The turns that templates take. Raises InvalidRequest for items that cannot be read."""
    turns: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    writer = _Writer(turns)
    for place, item in enumerate(items):
        writer.add(item, f"input.{place}")
    return turns


class _Writer:
    """Gathers the assistant's items into turns: reasoning, then text, then calls."""

    def __init__(self, turns: list[Json]) -> None:
        self._turns = turns
        self._open: Json | None = None  # the assistant's turn that may still grow
        self._num_values = 0

    def add(self, item: Item, where: str) -> None:
        """Take the next item in."""
        if item.type == "reasoning":
            self._think(item, where)
        elif item.type == "function_call":
            self._call(item, where)
        elif item.type == "function_call_output":
            self._close(
                {"role": "tool", "tool_call_id": item.call_id, "content": _shown(item.output)}
            )
        elif item.role == "assistant":
            self._speak("".join(part.words for part in item.content or ()))
        else:
            self._close({"role": item.role, "content": _shown(item.content)})

    def _think(self, item: Item, where: str) -> None:
        has_spoken = bool(self._open and (self._open["content"] or "tool_calls" in self._open))
        turn = self._assistant(is_fresh=has_spoken)
        text = _thoughts(item, where)
        if text:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _speak(self, text: str) -> None:
        last = self._open
        # What it said after its calls has no better place than before them.
        is_another = bool(last and last["content"] and "tool_calls" not in last)
        self._assistant(is_fresh=is_another)["content"] += text

    def _call(self, item: Item, where: str) -> None:
        arguments = call_arguments(item.arguments or "", where, "input")
        self._num_values += num_values(arguments)
        refuse_many_values(self._num_values, where, "input")
        function = {
            "name": joined_name(item.namespace, item.name or ""),
            "arguments": arguments,
        }
        call = {"id": item.call_id, "type": "function", "function": function}
        self._assistant(is_fresh=False).setdefault("tool_calls", []).append(call)

    def _assistant(self, *, is_fresh: bool) -> Json:
        if self._open is None or is_fresh:
            self._open = {"role": "assistant", "content": ""}
            self._turns.append(self._open)
        return self._open

    def _close(self, turn: Json) -> None:
        self._open = None
        self._turns.append(turn)


def _thoughts(item: Item, where: str) -> str:
    """The reasoning itself, open or sealed; a summary only where there is nothing else."""
    if item.content:
        return "".join(part.words for part in item.content)
    if item.encrypted_content is None:
        return "\n\n".join(part.words for part in item.summary or ())
    text = unseal(item.encrypted_content)
    if text is None:
        raise InvalidRequest(
            f"{where}: encrypted_content was not made by this server",
            param="input",
            code="invalid_encrypted_content",
        )
    return text


def _shown(parts: list[Part] | None) -> str | list[Json]:
    """A lone text is text: templates may treat lists in their own way."""
    shown = [part.shown() for part in parts or ()]
    if len(shown) == 1 and shown[0]["type"] == "text":
        return str(shown[0]["text"])
    return shown or ""
