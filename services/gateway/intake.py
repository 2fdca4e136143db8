"""Turns a validated request into prompt tokens, sampling, and the stages of its text.

Knows the checkpoint's defaults and the fleet's limits. A request that can never fit is refused
here.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any

from services.gateway.text.answer import Answer
from services.gateway.dialects.bounds import num_values, refuse_many_values
from services.gateway.failures import TOO_LONG, InvalidRequest
from services.gateway.text.glm import GlmParser, Parser, PlainParser
from services.gateway.dialects.openai import ChatRequest, CompletionRequest, Sampled
from services.gateway.text.tokenizer import Tokenizer
from shared import block_hash
from shared import farspan_pb2 as pb

# Names a client's template options may not take.
_TEMPLATE_OWN = {"messages", "tools", "add_generation_prompt"}


@dataclass(frozen=True)
class Prompt:
    """A prompt and its identity, in wire form."""

    num_tokens: int
    token_bytes: bytes
    block_hashes: bytes
    namespace: bytes


@dataclass(frozen=True)
class Intake:
    """A request ready to be placed."""

    prompt: Prompt
    answer: Answer


def take_in(
    request: ChatRequest | CompletionRequest,
    tokenizer: Tokenizer,
    namespace: bytes,
    max_tokens: int,
) -> Intake:
    """Tokens and text stages of a request. Heavy for long prompts: run it in a thread.

    Raises BadRequest for what cannot become a prompt.
    """
    parser: Parser
    if isinstance(request, ChatRequest):
        text = tokenizer.render(_turns(request), _tools(request), _template_options(request))
        token_ids = _encode(tokenizer, text, "messages", max_tokens)
        schemas = {
            tool.function.name: tool.function.parameters or {} for tool in request.offered_tools
        }
        parser = GlmParser(schemas, is_reasoning=text.rstrip().endswith("<think>"))
    else:
        token_ids = _completion_tokens(request, tokenizer, max_tokens)
        parser = PlainParser()
    data = block_hash.token_bytes(token_ids)
    hashes = block_hash.pack(block_hash.block_hashes(namespace, data))
    return Intake(
        Prompt(len(token_ids), data, hashes, namespace),
        Answer(tokenizer.detokenizer(), request.stops, parser),
    )


def sampling_params(
    request: Sampled, tokenizer: Tokenizer, max_new_tokens: int
) -> pb.SamplingParams:
    """The client's sampling, with the checkpoint's defaults where it is silent."""
    defaults = tokenizer.checkpoint
    seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
    top_k = defaults.top_k if request.top_k is None else request.top_k
    return pb.SamplingParams(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        top_k=max(0, top_k),
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop_token_ids=[] if request.ignore_eos else defaults.stop_token_ids,
    )


def fitting_max_new_tokens(
    num_prompt_tokens: int, asked: int | None, default: int, max_tokens: int
) -> int:
    """How long the answer may be, where prompt and answer have max_tokens together.

    Raises InvalidRequest when the request could never fit.
    """
    room = max_tokens - num_prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens and the answer needs one, the most that can"
            f" be served together is {max_tokens}",
            code=TOO_LONG,
        )
    if asked is not None and asked > room:
        raise InvalidRequest(
            f"the prompt's {num_prompt_tokens} tokens and {asked} new ones are more than the"
            f" {max_tokens} that can be served",
            param="max_tokens",
            code=TOO_LONG,
        )
    return min(default, room) if asked is None else asked


def _turns(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages as the template wants them: absent fields absent, call arguments as objects."""
    turns = [message.model_dump(exclude_none=True) for message in request.messages]
    num_found = 0
    for place, turn in enumerate(turns):
        where = f"messages.{place}.tool_calls"
        for call in turn.get("tool_calls", []):
            arguments = _arguments(call["function"]["arguments"], where)
            num_found += num_values(arguments)
            refuse_many_values(num_found, where, "messages")
            call["function"]["arguments"] = arguments
    return turns


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
        refuse_many_values(num_values(arguments), where, "messages")
        # What Python reads but JSON and UTF-8 do not know: NaN, infinities, lone surrogates.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}: arguments must be a JSON object", param="messages", code="invalid_value"
        )
    return arguments


def _tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in request.offered_tools] or None


def _template_options(request: ChatRequest) -> dict[str, Any]:
    options = dict(request.chat_template_kwargs or {})
    taken = _TEMPLATE_OWN & options.keys()
    if taken:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(sorted(taken))}",
            param="chat_template_kwargs",
        )
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
    return options


def _completion_tokens(
    request: CompletionRequest, tokenizer: Tokenizer, max_tokens: int
) -> list[int]:
    if isinstance(request.prompt, str):
        return _encode(tokenizer, request.prompt, "prompt", max_tokens)
    token_ids = [token_id for token_id in request.prompt if isinstance(token_id, int)]
    vocab_size = tokenizer.checkpoint.vocab_size
    largest = max(token_ids)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"token id {largest} is not in the vocabulary of {vocab_size}",
            param="prompt",
            code="invalid_value",
        )
    return token_ids


def _encode(tokenizer: Tokenizer, text: str, param: str, max_tokens: int) -> list[int]:
    if tokenizer.surely_exceeds(text, max_tokens):
        raise InvalidRequest(
            f"the prompt alone has more than the {max_tokens} tokens that can be served",
            param=param,
            code=TOO_LONG,
        )
    token_ids = tokenizer.encode(text)
    if not token_ids:
        raise InvalidRequest("the prompt is empty", param=param, code="invalid_value")
    return token_ids
