"""Turns what a client asks for into prompt tokens, sampling, and the stages of its text.

Knows the checkpoint's defaults and the fleet's limits. A request that can never fit is refused
here.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.ask import Ask, Chat, Prompt, Text, TokenIds, Wishes
from services.gateway.failures import TOO_LONG, InvalidRequest
from services.gateway.text import grammars
from services.gateway.text.answer import Answer, Stops
from services.gateway.text.glm import GlmParser, Parser, PlainParser
from services.gateway.text.tokenizer import Tokenizer
from shared import block_hash, sampling
from shared import farspan_pb2 as pb

MAX_ANSWERS = 256  # of one request: prompts times choices
MAX_ECHOED_LOGPROBS = 1 << 18  # of one prompt: 20 MB of JSON


@dataclass(frozen=True)
class Tokens:
    """A prompt and its identity, in wire form."""

    num_tokens: int
    token_bytes: bytes
    block_hashes: bytes
    namespace: bytes


@dataclass(frozen=True)
class Echo:
    """A prompt that its answers begin with."""

    text: str
    token_ids: Sequence[int] = ()  # given where logprobs are told


@dataclass(frozen=True)
class Limits:
    """What bounds one request, in tokens."""

    max_tokens: int  # prompt and answer together
    max_prompt_tokens: int
    default_new_tokens: int  # where the client is silent


@dataclass(frozen=True)
class Intake:
    """A request ready to be placed: its prompts, and how each of its answers is read."""

    prompts: list[Tokens]
    echoes: list[Echo]  # one for each prompt, where the ask shows_prompt
    samplings: list[pb.SamplingParams]  # one for each answer, prompt by prompt
    new_answer: Callable[[], Answer]


def take_in(
    ask: Ask, tokenizer: Tokenizer, tenant: str, namespace: bytes, limits: Limits
) -> Intake:
    """Tokens, sampling and text stages of a request. Heavy for long prompts: run it in a thread.

    Raises BadRequest for what cannot become a prompt or cannot be drawn.
    """
    try:
        return _taken_in(ask, tokenizer, tenant, namespace, limits)
    except InvalidRequest as error:
        error.rename(ask.names)
        raise


def _taken_in(
    ask: Ask, tokenizer: Tokenizer, tenant: str, namespace: bytes, limits: Limits
) -> Intake:
    if len(ask.prompts) * ask.num_choices > MAX_ANSWERS:
        raise InvalidRequest(f"more than {MAX_ANSWERS} answers", param="n", code="invalid_value")
    _check_wishes(ask, tokenizer)
    is_reasoning = False
    prompts = []
    for prompt in ask.prompts:
        encoded, is_reasoning = _encoded(prompt, tokenizer, tenant, limits)
        hashes = block_hash.pack(block_hash.block_hashes(namespace, encoded))
        prompts.append(Tokens(len(encoded) // 4, encoded, hashes, namespace))
    chat = ask.prompts[0] if isinstance(ask.prompts[0], Chat) else None
    grammar = grammars.grammar_of(ask.form, chat, is_reasoning=is_reasoning)
    samplings = []
    for tokens in prompts:
        found = samplings_of(ask, tokenizer, grammar, _new_tokens(ask, tokens, limits))
        sampling.check_prompt_logprobs(found[0], tokens.num_tokens)
        samplings += found
    echoes = []
    if ask.shows_prompt:
        echoes = [
            _echo(ask, prompt, tokens.token_bytes, tokenizer)
            for prompt, tokens in zip(ask.prompts, prompts, strict=True)
        ]
    return Intake(prompts, echoes, samplings, _answers(ask, chat, tokenizer, is_reasoning))


def _echo(ask: Ask, prompt: Prompt, encoded: bytes, tokenizer: Tokenizer) -> Echo:
    ids = block_hash.token_ids(encoded)
    match prompt:
        case Text(text):
            shown = text
        case TokenIds():
            shown = tokenizer.decode(ids, skips_special=False)
        case Chat():
            raise InvalidRequest("a chat cannot be echoed", param="echo")
    num_logprobs = ask.wishes.num_prompt_logprobs
    if num_logprobs is None:
        return Echo(shown)
    if len(ids) * (1 + num_logprobs) > MAX_ECHOED_LOGPROBS:
        raise InvalidRequest(
            f"logprobs of {len(ids)} prompt tokens and {num_logprobs} others beside each are more"
            f" than the {MAX_ECHOED_LOGPROBS} that are told",
            param="logprobs",
            code="invalid_value",
        )
    return Echo(shown, ids)


def prompt_token_ids(
    prompt: Prompt, tokenizer: Tokenizer, tenant: str, limits: Limits
) -> list[int]:
    """The tokens that a prompt becomes. Raises BadRequest for what cannot become any."""
    return block_hash.token_ids(_encoded(prompt, tokenizer, tenant, limits)[0])


def samplings_of(
    ask: Ask, tokenizer: Tokenizer, grammar: str | None, max_new_tokens: int
) -> list[pb.SamplingParams]:
    """How each answer to one prompt is drawn, with the checkpoint's defaults where it is silent.

    The answers' seeds follow one another, so that a seed names them all.
    """
    wishes, defaults = ask.wishes, tokenizer.checkpoint
    seed = secrets.randbits(63) if wishes.seed is None else wishes.seed
    own_stops = [] if wishes.ignore_eos else defaults.stop_token_ids
    top_k = defaults.top_k if wishes.top_k is None else wishes.top_k
    params = pb.SamplingParams(
        temperature=defaults.temperature if wishes.temperature is None else wishes.temperature,
        top_p=defaults.top_p if wishes.top_p is None else wishes.top_p,
        top_k=max(0, top_k),
        min_p=wishes.min_p,
        max_new_tokens=max_new_tokens,
        min_new_tokens=wishes.min_new_tokens,
        presence_penalty=wishes.presence_penalty,
        frequency_penalty=wishes.frequency_penalty,
        repetition_penalty=wishes.repetition_penalty,
        bias_token_ids=list(wishes.logit_bias),
        biases=list(wishes.logit_bias.values()),
        stop_token_ids=list(dict.fromkeys((*own_stops, *wishes.stop_token_ids))),
    )
    if wishes.num_logprobs is not None:
        params.num_logprobs = wishes.num_logprobs
    if wishes.num_prompt_logprobs is not None:
        params.num_prompt_logprobs = wishes.num_prompt_logprobs
    if grammar is not None:
        params.grammar.CopyFrom(pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text=grammar))
    found = []
    for number in range(ask.num_choices):
        own = pb.SamplingParams()
        own.CopyFrom(params)
        own.seed = (seed + number) % 2**64
        found.append(own)
    return found


def fitting_max_new_tokens(num_prompt: int, asked: int | None, limits: Limits) -> int:
    """How long the answer may be beside a prompt of so many tokens.

    Raises InvalidRequest when the request could never fit, in the words by which clients such as
    Claude Code know that they must shorten the conversation, or ask for a shorter answer.
    """
    room = limits.max_tokens - num_prompt
    if room < 1:
        raise InvalidRequest(
            f"the prompt is too long: {num_prompt} tokens > {limits.max_tokens - 1} that can be"
            " served before an answer",
            code=TOO_LONG,
        )
    if asked is not None and asked > room:
        raise InvalidRequest(
            "input length and `max_tokens` exceed context limit:"
            f" {num_prompt} + {asked} > {limits.max_tokens}",
            param="max_tokens",
            code=TOO_LONG,
        )
    return min(limits.default_new_tokens, room) if asked is None else asked


def _new_tokens(ask: Ask, prompt: Tokens, limits: Limits) -> int:
    found = fitting_max_new_tokens(prompt.num_tokens, ask.wishes.max_new_tokens, limits)
    if ask.wishes.min_new_tokens > found:
        raise InvalidRequest(
            f"min_tokens is {ask.wishes.min_new_tokens}, and the answer has at most {found} tokens",
            param="min_tokens",
            code="invalid_value",
        )
    return found


def _answers(
    ask: Ask, chat: Chat | None, tokenizer: Tokenizer, is_reasoning: bool
) -> Callable[[], Answer]:
    wishes = ask.wishes
    stops = Stops(wishes.stops, frozenset(wishes.stop_token_ids), wishes.min_new_tokens)

    def describe(token_id: int) -> tuple[str, bytes]:
        return tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)

    functions = [tool["function"] for tool in chat.tools] if chat is not None else []
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}

    def new_answer() -> Answer:
        parser: Parser = PlainParser()
        if chat is not None:
            parser = GlmParser(
                schemas, is_reasoning=is_reasoning, max_calls=None if chat.is_parallel else 1
            )
        return Answer(tokenizer.detokenizer(), stops, parser, describe)

    return new_answer


def _check_wishes(ask: Ask, tokenizer: Tokenizer) -> None:
    wishes: Wishes = ask.wishes
    vocab_size = tokenizer.checkpoint.vocab_size
    for name, ids in (
        ("logit_bias", wishes.logit_bias),
        ("stop_token_ids", wishes.stop_token_ids),
    ):
        _check_ids(max(ids, default=0), vocab_size, name)
    if ask.has_form and (wishes.ignore_eos or wishes.min_new_tokens):
        raise InvalidRequest(
            "an answer of a given form ends when it is complete: ignore_eos and min_tokens"
            " cannot be met",
            param="ignore_eos" if wishes.ignore_eos else "min_tokens",
            code="invalid_value",
        )


def _encoded(
    prompt: Prompt, tokenizer: Tokenizer, tenant: str, limits: Limits
) -> tuple[bytes, bool]:
    """The prompt's token ids, and whether it ends inside the model's reasoning."""
    most = min(limits.max_tokens, limits.max_prompt_tokens)
    is_reasoning = False
    match prompt:
        case Chat():
            text = tokenizer.render(prompt.messages, prompt.tools or None, prompt.template_options)
            is_reasoning = text.rstrip().endswith("<think>")
            encoded = _encode(tokenizer, text, tenant, "messages", most)
        case Text(text):
            encoded = _encode(tokenizer, text, tenant, "prompt", most)
        case TokenIds(ids):
            _check_ids(max(ids), tokenizer.checkpoint.vocab_size, "prompt")
            encoded = block_hash.token_bytes(ids)
    num_tokens = len(encoded) // 4
    if num_tokens > limits.max_prompt_tokens:
        raise InvalidRequest(
            f"the prompt is too long: {num_tokens} tokens > {limits.max_prompt_tokens} that are"
            " taken",
            code=TOO_LONG,
        )
    return encoded, is_reasoning


def _check_ids(largest: int, vocab_size: int, param: str) -> None:
    if largest >= vocab_size:
        raise InvalidRequest(
            f"token id {largest} is not in the vocabulary of {vocab_size}",
            param=param,
            code="invalid_value",
        )


def _encode(tokenizer: Tokenizer, text: str, tenant: str, param: str, max_tokens: int) -> bytes:
    if tokenizer.surely_exceeds(text, max_tokens, tenant):
        raise InvalidRequest(
            f"the prompt is too long: more than the {max_tokens} tokens that can be served",
            param=param,
            code=TOO_LONG,
        )
    encoded = tokenizer.encode_bytes(text, tenant)
    if not encoded:
        raise InvalidRequest("the prompt is empty", param=param, code="invalid_value")
    return encoded
