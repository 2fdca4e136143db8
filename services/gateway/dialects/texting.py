"""POST /tokenize and /detokenize, in the shapes that vLLM's clients know."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from services.gateway.ask import Chat, Prompt, Text
from services.gateway.dialects.bounds import MAX_PROMPT_TOKENS
from services.gateway.dialects.chat import (
    MAX_TEMPLATE_OPTIONS,
    Message,
    Tool,
    template_options,
    turns,
)
from services.gateway.dialects.shapes import MAX_INT, MAX_TOOLS, Served, Shape, parse

TOKENIZE_SERVED: Served = {
    "continue_final_message": (False,),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}


class TokenizeRequest(Shape):
    """POST /tokenize: a prompt or a chat. No tokens are added that a completion would not have."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_OPTIONS)] | None
    ) = None

    @model_validator(mode="after")
    def _is_one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages")
        return self

    def asked(self) -> Prompt:
        """What is to become tokens. Raises InvalidRequest."""
        if self.messages is None:
            return Text(self.prompt or "")
        options = template_options(self.chat_template_kwargs, None)
        if self.add_generation_prompt is False:
            options["add_generation_prompt"] = False
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return Chat(turns(self.messages), tools, template_options=options)


class DetokenizeRequest(Shape):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=MAX_INT)]],
        Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS),
    ]


def read_tokenize(body: bytes) -> TokenizeRequest:
    """The request in a body. Raises InvalidRequest."""
    return parse(TokenizeRequest, body, TOKENIZE_SERVED)


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """The request in a body. Raises InvalidRequest."""
    return parse(DetokenizeRequest, body, {})
