"""POST /v1/messages and its count_tokens: the requests' shapes, and what they ask for."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from services.gateway.ask import (
    Ask,
    Chat,
    Form,
    Json,
    JsonSchema,
    Named,
    ToolChoice,
    Wishes,
)
from services.gateway.dialects.chat import checked_choice, template_options
from services.gateway.dialects.messages_input import (
    Blocks,
    Turn,
    conversation,
    without_old_thinking,
)
from services.gateway.dialects.shapes import (
    MAX_INT,
    MAX_TOOLS,
    Count,
    Served,
    Shape,
    ShapeT,
    checked_stops,
    parse,
)
from services.gateway.failures import InvalidRequest

_THREAD = "thread"
SERVED: Served = {
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
    "fallbacks": ([],),
    "fallback_credit_token": (),
    _THREAD: (),
    "inference_geo": (),
    "speed": ("standard",),
}
_CLEAR_THINKING = "clear_thinking_20251015"


class Thinking(Shape):
    """Whether the model thinks first. A budget is not enforced."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Shape):
    """The form of the answer proper."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Shape):
    """How much effort, and which form."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None


class OfferedTool(Shape):
    """A tool that the client runs."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @field_validator("type")
    @classmethod
    def _is_the_clients(cls, kind: str | None) -> str | None:
        if kind not in (None, "custom"):
            raise ValueError(
                f"{kind!r} tools are not supported; only tools with an input_schema are"
            )
        return kind

    def offered(self) -> Json:
        """The tool as templates take it."""
        function: Json = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema or {}
        return {"type": "function", "function": function}


class Choice(Shape):
    """Whether and which tools must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingTurns(Shape):
    """How many turns keep their thinking."""

    type: Literal["thinking_turns"]
    value: Count


class Edit(Shape):
    """What of the conversation the model is not to see again."""

    type: str
    keep: Literal["all"] | ThinkingTurns | None = None

    @field_validator("type")
    @classmethod
    def _is_served(cls, kind: str) -> str:
        if kind != _CLEAR_THINKING:
            raise ValueError(f"{kind!r} is not supported; only {_CLEAR_THINKING!r} is")
        return kind


class ContextManagement(Shape):
    """Edits of the conversation."""

    edits: Annotated[list[Edit], Field(max_length=8)] | None = None


class CountRequest(Shape):
    """POST /v1/messages/count_tokens: what makes a prompt."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Blocks | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None

    @field_validator("messages")
    @classmethod
    def _the_assistant_is_next(cls, messages: list[Turn]) -> list[Turn]:
        if messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's: prefilling is not supported")
        return messages

    def chat(self) -> Chat:
        """The conversation. Raises InvalidRequest for a tool_choice that cannot be met."""
        given = self.tool_choice or Choice(type="auto")
        tools = [tool.offered() for tool in self.tools or () if given.type != "none"]
        choice: ToolChoice = "auto"
        if given.type == "any":
            choice = "required"
        elif given.type == "tool":
            choice = Named(given.name or "")
        return Chat(
            messages=self._turns(),
            tools=tools,
            tool_choice=checked_choice(choice, tools),
            is_parallel=not given.disable_parallel_tool_use,
            template_options=self._template_options(),
        )

    def form(self) -> Form | None:
        """What the answer must be."""
        found = self._newer_format or self.output_format
        return JsonSchema(found.json_schema) if found else None

    @property
    def _newer_format(self) -> OutputFormat | None:
        return self.output_config.format if self.output_config else None

    @property
    def _format_name(self) -> str:
        return "output_config.format" if self._newer_format else "output_format"

    def _turns(self) -> list[Json]:
        turns = conversation(self.system, self.messages)
        edits = (self.context_management.edits if self.context_management else None) or ()
        for edit in edits:
            if edit.keep != "all":
                turns = without_old_thinking(turns, edit.keep.value if edit.keep else 1)
        return turns

    def _template_options(self) -> Json:
        effort = self.output_config.effort if self.output_config else None
        options = template_options(None, effort)
        if self.thinking is not None:
            options["enable_thinking"] = self.thinking.type != "disabled"
        return options


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None  # higher goes first

    @field_validator("stop_sequences")
    @classmethod
    def _stops_are_usable(cls, stops: list[str] | None) -> list[str] | None:
        checked_stops(stops)
        return stops

    @property
    def hides_thinking(self) -> bool:
        """Whether the client wants to carry the thinking, not to see it."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def ask(self) -> Ask:
        """What it asks for. Raises InvalidRequest for parts that do not fit together."""
        return Ask(
            model=self.model,
            prompts=(self.chat(),),
            wishes=Wishes(
                max_new_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                stops=tuple(self.stop_sequences or ()),
            ),
            form=self.form(),
            is_stream=bool(self.stream),
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            names={"response_format": self._format_name},
        )


def read(body: bytes) -> MessagesRequest:
    """The request in a body. Raises InvalidRequest."""
    return _parsed(MessagesRequest, body)


def read_count(body: bytes) -> CountRequest:
    """The request for a count in a body. Raises InvalidRequest."""
    return _parsed(CountRequest, body)


def _parsed(shape: type[ShapeT], body: bytes) -> ShapeT:
    try:
        return parse(shape, body, SERVED)
    except InvalidRequest as error:
        if error.param == _THREAD:
            # Anthropic's tool runner asks for a thread unasked; by these words it goes on without.
            error.details = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
        raise
