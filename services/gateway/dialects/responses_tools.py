"""The Responses API's tools: what is offered, which must be called, and how both are told again."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from services.gateway.ask import Json
from services.gateway.dialects.responses_input import joined_name
from services.gateway.dialects.shapes import MAX_TOOLS, Shape
from services.gateway.failures import InvalidRequest

_SEARCH = "web_search"


class OfferedTool(Shape):
    """A tool that the client runs, or a namespace of them; a search is not offered to the model.

    Clients such as Codex always name the search: it permits, and demands nothing.
    """

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: "Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None" = None

    @field_validator("type")
    @classmethod
    def _is_the_clients(cls, kind: str) -> str:
        if kind not in ("function", "namespace") and not kind.startswith(_SEARCH):
            raise ValueError(f"{kind!r} tools are not supported; only functions are")
        return kind

    def functions(self, namespace: str | None = None) -> Iterator[tuple[str | None, "OfferedTool"]]:
        """(namespace, function) of what is offered. Raises InvalidRequest for nameless ones."""
        if self.type.startswith(_SEARCH):
            return
        if self.name is None or (self.type == "namespace" and namespace is not None):
            raise InvalidRequest(
                "tools: a function needs a name, and a namespace holds functions only",
                param="tools",
                code="invalid_value",
            )
        if self.type == "function":
            yield namespace, self
        for tool in self.tools or ():
            yield from tool.functions(self.name)

    def offered(self, namespace: str | None) -> Json:
        """The function as templates take it."""
        function: Json = {"name": joined_name(namespace, self.name or "")}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {}
        return {"type": "function", "function": function}


class ChosenTool(Shape):
    """A tool in a tool_choice."""

    type: Literal["function"]
    name: str
    namespace: str | None = None

    @property
    def joined(self) -> str:
        """The name by which the model knows it."""
        return joined_name(self.namespace, self.name)


class Choice(Shape):
    """A tool_choice; a word alone is its type."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ChosenTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


def as_choice(given: Any) -> Any:
    """A word alone as the object that it stands for."""
    return {"type": given} if isinstance(given, str) else given


def echoed_choice(choice: Choice | None) -> Json | str:
    """A tool_choice as it came."""
    if choice is None:
        return "auto"
    is_word = choice.type in ("none", "auto", "required")
    return choice.type if is_word else choice.model_dump(exclude_none=True)


def echoed_tools(tools: list[OfferedTool] | None) -> list[Json]:
    """Those that the model may call."""
    return [_echoed_tool(tool) for tool in tools or () if not tool.type.startswith(_SEARCH)]


def _echoed_tool(tool: OfferedTool) -> Json:
    echo: Json = {"type": tool.type, "name": tool.name, "description": tool.description}
    if tool.type == "namespace":
        return {**echo, "tools": [_echoed_tool(each) for each in tool.tools or ()]}
    return {**echo, "parameters": tool.parameters, "strict": bool(tool.strict)}
