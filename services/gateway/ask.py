"""What a client asks for, whatever API it speaks: plain data that every dialect's request becomes.

Knows neither JSON nor tokens. None means that the client is silent and the checkpoint's or the
gateway's default holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]


@dataclass(frozen=True)
class Wishes:
    """How tokens are to be drawn, and when to stop."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 and 0 = off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # besides the checkpoint's own
    ignore_eos: bool = False
    num_logprobs: int | None = None  # likeliest tokens beside each token's own; None = no logprobs
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Named:
    """This tool must be called."""

    name: str


ToolChoice = Literal["auto", "required"] | Named


@dataclass(frozen=True)
class Chat:
    """A conversation. Messages are what chat templates take: role, content, reasoning_content,
    tool_calls whose function.arguments is an object, tool_call_id; absent fields are absent.
    """

    messages: list[Json]
    tools: list[Json] = field(default_factory=list)  # {"type": "function", "function": {...}}
    tool_choice: ToolChoice = "auto"
    is_parallel: bool = True  # more than one call may be made
    template_options: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """A prompt as text."""

    text: str


@dataclass(frozen=True)
class TokenIds:
    """A prompt as token ids."""

    ids: list[int]


Prompt = Chat | Text | TokenIds


@dataclass(frozen=True)
class JsonObject:
    """The answer proper is any JSON object."""


@dataclass(frozen=True)
class JsonSchema:
    """The answer proper is JSON of this schema."""

    schema: Any


@dataclass(frozen=True)
class Regex:
    """The answer proper matches this regular expression."""

    pattern: str


@dataclass(frozen=True)
class OneOf:
    """The answer proper is one of these texts."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class Lark:
    """The answer proper is of this grammar, in llguidance's dialect of Lark."""

    grammar: str


Form = JsonObject | JsonSchema | Regex | OneOf | Lark


@dataclass(frozen=True)
class Ask:
    """One request."""

    model: str
    prompts: tuple[Prompt, ...]  # a chat is alone
    wishes: Wishes = Wishes()
    num_choices: int = 1  # answers for each prompt
    form: Form | None = None
    is_stream: bool = False
    shows_prompt: bool = False  # echo: the prompt's text (and logprobs) come with the answer
    cache_salt: str = ""
    priority: int = 0
    session: str = ""  # what the body names as its conversation; a header may too
    names: Mapping[str, str] = field(default_factory=dict)  # chat's parameter -> this request's

    @property
    def has_form(self) -> bool:
        """Whether the answer is bound: to a form, or to a tool that must be called."""
        first = self.prompts[0]
        return self.form is not None or (isinstance(first, Chat) and first.tool_choice != "auto")
