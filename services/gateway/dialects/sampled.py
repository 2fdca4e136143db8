"""The fields that OpenAI's chat completions and completions share, with vLLM's additions."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from services.gateway.ask import Form, Wishes
from services.gateway.dialects.formats import ResponseFormat, StructuredOutputs
from services.gateway.dialects.shapes import (
    MAX_INT,
    MAX_STOPS,
    Count,
    Shape,
    checked_stops,
    stop_list,
)
from services.gateway.failures import InvalidRequest

MAX_CHOICES = 16
MAX_BIASES = 1024


class StreamOptions(Shape):
    """How a stream is to be shaped."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Shape):
    """What chat completions and completions share. None means the client is silent."""

    model: str
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(max_length=MAX_STOPS)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None  # higher goes first
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @field_validator("stop")
    @classmethod
    def _stops_are_usable(cls, stop: str | list[str] | None) -> str | list[str] | None:
        return checked_stops(stop)

    @field_validator("logit_bias")
    @classmethod
    def _biases_name_tokens(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias and not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
            raise ValueError("its keys are token ids")
        return bias

    def form(self) -> Form | None:
        """What the answer must be. Raises InvalidRequest for two different wishes."""
        found = self.response_format.form() if self.response_format else None
        other = self.structured_outputs.form() if self.structured_outputs else None
        if found is not None and other is not None:
            raise InvalidRequest(
                "response_format and structured_outputs: only one of them",
                param="structured_outputs",
                code="invalid_value",
            )
        return found or other

    def names(self) -> dict[str, str]:
        """What this request calls the parameters that errors are about, where it has a choice."""
        has_schema = self.structured_outputs and self.structured_outputs.json_ is not None
        return {"response_format": "structured_outputs"} if has_schema else {}

    def wishes(
        self,
        *,
        max_new_tokens: int | None,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None = None,
    ) -> Wishes:
        """How tokens are to be drawn, with what only one of the two APIs knows."""
        bias = {int(key): value for key, value in (self.logit_bias or {}).items()}
        return Wishes(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=bias,
            stops=stop_list(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )
