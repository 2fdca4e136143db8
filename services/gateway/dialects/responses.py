"""POST /v1/responses: the request's shape, and what it asks for."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from services.gateway.ask import (
    Ask,
    Chat,
    Form,
    Json,
    JsonObject,
    JsonSchema,
    Named,
    ToolChoice,
    Wishes,
)
from services.gateway.dialects.chat import checked_choice, template_options
from services.gateway.dialects.responses_input import Items, conversation, joined_name
from services.gateway.dialects.responses_tools import (
    Choice,
    OfferedTool,
    as_choice,
    echoed_choice,
    echoed_tools,
)
from services.gateway.dialects.shapes import (
    MAX_INT,
    MAX_TOOLS,
    Count,
    Served,
    Shape,
    parse,
    word_or,
)
from services.gateway.failures import InvalidRequest
from shared.sampling import MAX_LOGPROBS

SERVED: Served = {
    "background": (False,),
    "background_options": (),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "truncation": ("disabled",),
}
SEALED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
}
# These concern items that are never in an answer.
_MOOT_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class TextFormat(Shape):
    """The form of the answer proper."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def form(self) -> Form | None:
        """None for any text. Raises InvalidRequest for a schema that is missing."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JsonObject()
        if self.json_schema is None:
            raise InvalidRequest(
                "text.format.schema is missing", param="text.format", code="invalid_value"
            )
        return JsonSchema(self.json_schema)


class TextConfig(Shape):
    """What the answer's text is like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Shape):
    """How the model thinks. Summaries are not written: the reasoning itself is given."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesRequest(Shape):
    """POST /v1/responses."""

    model: str
    input: Items
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[Choice, word_or(Choice, as_choice)] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None  # higher goes first

    @field_validator("include")
    @classmethod
    def _includes_are_known(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if name not in (SEALED_REASONING, LOGPROBS, *_MOOT_INCLUDES):
                raise ValueError(f"{name!r} is not supported")
        return names

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning comes in a form to hand back, too."""
        return SEALED_REASONING in (self.include or ())

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are wanted beside each; None for no logprobs."""
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return self.top_logprobs or None

    def functions(self) -> dict[str, tuple[str | None, OfferedTool]]:
        """What is offered: joined name -> (namespace, function)."""
        pairs = [pair for tool in self.tools or () for pair in tool.functions()]
        return {
            joined_name(namespace, tool.name or ""): (namespace, tool) for namespace, tool in pairs
        }

    def ask(self) -> Ask:
        """What it asks for. Raises InvalidRequest for parts that do not fit together."""
        text_format = self.text.format if self.text else None
        return Ask(
            model=self.model,
            prompts=(self._chat(),),
            wishes=Wishes(
                max_new_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                num_logprobs=self.num_logprobs,
            ),
            form=text_format.form() if text_format else None,
            is_stream=bool(self.stream),
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            session=self.prompt_cache_key or "",
            names=_NAMES,
        )

    def _chat(self) -> Chat:
        functions = self.functions()
        choice: ToolChoice = "auto"
        match self.tool_choice:
            case Choice(type="none"):
                functions = {}
            case Choice(type="required"):
                choice = "required"
            case Choice(type="function", name=name, namespace=namespace):
                choice = Named(joined_name(namespace, name or ""))
            case Choice(type="allowed_tools", mode=mode, tools=chosen):
                allowed = {tool.joined for tool in chosen or ()}
                functions = {name: each for name, each in functions.items() if name in allowed}
                choice = "required" if mode == "required" else "auto"
        tools = [tool.offered(namespace) for namespace, tool in functions.values()]
        return Chat(
            messages=conversation(self.instructions, self.input),
            tools=tools,
            tool_choice=checked_choice(choice, tools),
            is_parallel=self.parallel_tool_calls is not False,
            template_options=template_options(
                None, self.reasoning.effort if self.reasoning else None
            ),
        )


def echoed(request: ResponsesRequest) -> Json:
    """What a response tells of its request; tools are those that the model may call."""
    reasoning, text = request.reasoning, request.text
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": request.temperature,
        "text": {
            "format": text.format.model_dump(by_alias=True, exclude_none=True)
            if text and text.format
            else {"type": "text"},
            "verbosity": "medium",
        },
        "tool_choice": echoed_choice(request.tool_choice),
        "tools": echoed_tools(request.tools),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def read(body: bytes) -> ResponsesRequest:
    """The request in a body. Raises InvalidRequest."""
    return parse(ResponsesRequest, body, SERVED)
