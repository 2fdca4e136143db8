"""The public API's request shapes and their validation.

A body is parsed strictly: no type is converted, unknown fields are ignored, and fields that are
known but not served are refused by name unless they hold their default. Knows neither tokens nor
workers.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from services.gateway.dialects.bounds import refuse_endless
from services.gateway.failures import InvalidRequest

MAX_INT = 2**31 - 1
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
MAX_TOOLS = 1024
MAX_TEMPLATE_OPTIONS = 64

Count = Annotated[int, Field(ge=1, le=MAX_INT)]

# Known fields whose only served values are these; null is always served.
_CHAT_ONLY: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
_COMPLETION_ONLY: dict[str, tuple[object, ...]] = {
    **{
        name: _CHAT_ONLY[name]
        for name in ("n", "frequency_penalty", "presence_penalty", "logit_bias")
    },
    **{name: _CHAT_ONLY[name] for name in ("repetition_penalty", "min_p", "response_format")},
    "best_of": (1,),
    "logprobs": (),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
}


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class StreamOptions(_Shape):
    """How a stream is to be shaped."""

    include_usage: bool | None = None


class Function(_Shape):
    """A function as offered; `parameters` is a JSON schema. Templates print in this order."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Shape):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class CalledFunction(_Shape):
    """A call the assistant made earlier; arguments is JSON text."""

    name: str
    arguments: str


class CalledTool(_Shape):
    """One entry of an assistant message's tool_calls."""

    id: str | None = None
    function: CalledFunction


class ContentPart(_Shape):
    """A part of a message; the model reads text, and the template says so of other parts."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _text_has_text(self) -> "ContentPart":
        if self.type == "text" and self.text is None:
            raise ValueError("a text part needs text")
        return self


class Message(_Shape):
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


class Sampled(_Shape):
    """What both endpoints share. None means the client is silent."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None  # higher goes first

    @field_validator("stop")
    @classmethod
    def _stops_are_usable(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings")
        if not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return stop

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_OPTIONS)] | None
    ) = None

    @field_validator("tool_choice")
    @classmethod
    def _tool_choice_is_served(cls, choice: Any) -> Any:
        if choice not in (None, "none", "auto"):
            raise ValueError("only 'none' and 'auto' are supported")
        return choice

    @property
    def max_new_tokens(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    # The first wrong item is enough: a million errors take seconds to collect.
    prompt: (
        str
        | Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True)]
    )

    @field_validator("prompt")
    @classmethod
    def _prompt_is_one(cls, prompt: str | list[int] | list[str]) -> str | list[int]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise ValueError("one prompt a request")
            return prompt[0]
        if not prompt:
            raise ValueError("the prompt is empty")
        return prompt  # type: ignore[return-value]  # a list of ids: the strings were handled above

    @property
    def max_new_tokens(self) -> int | None:
        """How long the answer may be, where the client says."""
        return self.max_tokens


RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)


def parse(shape: type[RequestT], body: bytes) -> RequestT:
    """The request in a body. Raises InvalidRequest that names the parameter at fault."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_type")
    refuse_endless(fields)
    _refuse_unserved(_CHAT_ONLY if shape is ChatRequest else _COMPLETION_ONLY, fields)
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        raise _as_invalid(error) from None


def _refuse_unserved(only: dict[str, tuple[object, ...]], fields: dict[str, Any]) -> None:
    """Raise for a field that is known, not served, and not at its default."""
    for name, served in only.items():
        value = fields.get(name)
        if value is not None and not any(_equals(value, allowed) for allowed in served):
            hint = f"; only {' or '.join(map(json.dumps, served))} is" if served else ""
            raise InvalidRequest(
                f"{name} is not supported{hint}", param=name, code="unsupported_value"
            )


def _equals(value: object, allowed: object) -> bool:
    """Equal as JSON values: true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


def _as_invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    names = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return InvalidRequest(f"{'.'.join(names)}: {message}", param=names[0], code=code)
