"""POST /v1/completions: the request's shape, and what it asks for."""

from typing import Annotated

from pydantic import Field, field_validator

from services.gateway.ask import Ask, Prompt, Text, TokenIds
from services.gateway.dialects.sampled import Sampled
from services.gateway.dialects.shapes import MAX_INT, Served, parse
from shared.sampling import MAX_LOGPROBS

MAX_PROMPTS = 128

SERVED: Served = {
    "prompt_logprobs": (0,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}

_Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(fail_fast=True)]


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    # The first wrong item is enough: a million errors take seconds to collect.
    prompt: (
        str
        | _Ids
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[_Ids], Field(fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None

    @field_validator("prompt")
    @classmethod
    def _prompts_are_usable(
        cls, prompt: str | list[int] | list[str] | list[list[int]]
    ) -> str | list[int] | list[str] | list[list[int]]:
        if not prompt:
            raise ValueError("the prompt is empty")
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        if not is_one and len(prompt) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts a request")
        if not is_one and not all(prompt):
            raise ValueError("a prompt is empty")
        return prompt

    @field_validator("best_of")
    @classmethod
    def _best_is_any(cls, best_of: int | None) -> int | None:
        if best_of not in (None, 1):
            raise ValueError("only 1 is supported")
        return best_of

    def ask(self) -> Ask:
        """What it asks for. Raises InvalidRequest for parts that do not fit together."""
        shows_prompt = bool(self.echo)
        return Ask(
            model=self.model,
            prompts=self._prompts(),
            wishes=self.wishes(
                max_new_tokens=self.max_tokens,
                num_logprobs=self.logprobs,
                num_prompt_logprobs=self.logprobs if shows_prompt else None,
            ),
            num_choices=self.n or 1,
            form=self.form(),
            is_stream=bool(self.stream),
            shows_prompt=shows_prompt,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            session=self.prompt_cache_key or "",
            names=self.names(),
        )

    def _prompts(self) -> tuple[Prompt, ...]:
        if isinstance(self.prompt, str):
            return (Text(self.prompt),)
        if isinstance(self.prompt[0], int):
            return (TokenIds([item for item in self.prompt if isinstance(item, int)]),)
        return tuple(
            Text(item) if isinstance(item, str) else TokenIds(item)
            for item in self.prompt
            if not isinstance(item, int)
        )


def read(body: bytes) -> CompletionRequest:
    """The request in a body. Raises InvalidRequest."""
    return parse(CompletionRequest, body, SERVED)
