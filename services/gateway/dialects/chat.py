"""POST /v1/chat/completions: the request's shape, and what it asks for."""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from services.gateway.ask import Ask, Chat, Json, Named, ToolChoice
from services.gateway.dialects.bounds import num_values, refuse_many_values
from services.gateway.dialects.sampled import Sampled
from services.gateway.dialects.shapes import MAX_TOOLS, Count, Served, Shape, parse, word_or
from services.gateway.dialects.structure import refuse_intricate
from services.gateway.failures import InvalidRequest
from shared.sampling import MAX_LOGPROBS

MAX_TEMPLATE_OPTIONS = 64

# Names a client's template options may not take.
_TEMPLATE_OWN = {"messages", "tools", "add_generation_prompt"}

SERVED: Served = {
    "prompt_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}


class Function(Shape):
    """A function as offered; `parameters` is a JSON schema. Templates print in this order."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Shape):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class CalledFunction(Shape):
    """A call the assistant made earlier; arguments is JSON text."""

    name: str
    arguments: str


class CalledTool(Shape):
    """One entry of an assistant message's tool_calls."""

    id: str | None = None
    function: CalledFunction


class ContentPart(Shape):
    """A part of a message; the model reads text, and the template says so of other parts."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _text_has_text(self) -> "ContentPart":
        if self.type == "text" and self.text is None:
            raise ValueError("a text part needs text")
        return self


class Message(Shape):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _only_the_assistant_may_say_nothing(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self


class ChosenFunction(Shape):
    """A function's name."""

    name: str


class ChosenTool(Shape):
    """Whether a tool is to be called, and which."""

    type: Literal["none", "auto", "required", "function"]
    function: ChosenFunction | None = None

    @model_validator(mode="after")
    def _a_function_has_a_name(self) -> "ChosenTool":
        if self.type == "function" and self.function is None:
            raise ValueError("function is missing")
        return self


def _as_chosen(given: Any) -> Any:
    """A word alone as the object that it stands for, so that an error names one thing only."""
    return {"type": given} if isinstance(given, str) else given


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ChosenTool, word_or(ChosenTool, _as_chosen)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_OPTIONS)] | None
    ) = None

    def ask(self) -> Ask:
        """What it asks for. Raises InvalidRequest for parts that do not fit together."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value"
            )
        return Ask(
            model=self.model,
            prompts=(self._chat(),),
            wishes=self.wishes(
                max_new_tokens=self.max_completion_tokens or self.max_tokens,  # the newer name wins
                num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            num_choices=self.n or 1,
            form=self.form(),
            is_stream=bool(self.stream),
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            session=self.prompt_cache_key or "",
            names=self.names(),
        )

    def names(self) -> dict[str, str]:
        """See Sampled."""
        newer = {"max_tokens": "max_completion_tokens"} if self.max_completion_tokens else {}
        return super().names() | newer

    def _chat(self) -> Chat:
        chosen = self.tool_choice
        is_offered = chosen is None or chosen.type != "none"
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or () if is_offered]
        choice: ToolChoice = "auto"
        if chosen is not None and chosen.function is not None:
            choice = Named(chosen.function.name)
        elif chosen is not None and chosen.type == "required":
            choice = "required"
        return Chat(
            messages=turns(self.messages),
            tools=tools,
            tool_choice=checked_choice(choice, tools),
            is_parallel=self.parallel_tool_calls is not False,
            template_options=template_options(self.chat_template_kwargs, self.reasoning_effort),
        )


def read(body: bytes) -> ChatRequest:
    """The request in a body. Raises InvalidRequest."""
    return parse(ChatRequest, body, SERVED)


def checked_choice(choice: ToolChoice, tools: list[Json]) -> ToolChoice:
    """The choice. Raises InvalidRequest when it cannot be met with these tools."""
    names = [tool["function"]["name"] for tool in tools]
    message = ""
    if choice != "auto" and not tools:
        message = "tool_choice demands a call, and no tools are offered"
    elif isinstance(choice, Named) and choice.name not in names:
        message = f"tool_choice names {choice.name!r}, which is not among the tools"
    if message:
        raise InvalidRequest(message, param="tool_choice", code="invalid_value")
    return choice


def template_options(options: dict[str, Any] | None, reasoning_effort: str | None) -> Json:
    """What the template is given besides messages and tools. Raises InvalidRequest."""
    chosen = dict(options or {})
    taken = _TEMPLATE_OWN & chosen.keys()
    if taken:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(sorted(taken))}",
            param="chat_template_kwargs",
        )
    if reasoning_effort == "none":
        chosen.setdefault("enable_thinking", False)
    elif reasoning_effort is not None:
        chosen["reasoning_effort"] = reasoning_effort
    return chosen


def turns(messages: list[Message]) -> list[Json]:
    """The messages as templates want them: absent fields absent, call arguments as objects."""
    found = [message.model_dump(exclude_none=True) for message in messages]
    num_found = 0
    for place, turn in enumerate(found):
        where = f"messages.{place}.tool_calls"
        for call in turn.get("tool_calls", []):
            arguments = call_arguments(call["function"]["arguments"], where)
            num_found += num_values(arguments)
            refuse_many_values(num_found, where, "messages")
            call["function"]["arguments"] = arguments
    return found


def call_arguments(text: str, where: str, param: str = "messages") -> Json:
    """An earlier call's arguments. Raises InvalidRequest unless they are a JSON object."""
    refuse_intricate(text.encode(errors="surrogatepass"), where, param)
    try:
        arguments = json.loads(text or "{}")
        refuse_many_values(num_values(arguments), where, param)
        # What Python reads but JSON and UTF-8 do not know: NaN, infinities, lone surrogates.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}: arguments must be a JSON object", param=param, code="invalid_value"
        )
    return arguments
