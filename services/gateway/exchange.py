"""One POST to a generating endpoint, after its body was read: validate, generate, answer.

Knows the order of things; what each step means is elsewhere.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.datastructures import Headers

from services.gateway.text.answer import Answer
from services.gateway.attempt import Job, Line
from services.gateway.config import GatewayConfig
from services.gateway.failures import InvalidRequest, as_http
from services.gateway.generation import Generation, Usage, generation
from services.gateway.intake import (
    Intake,
    fitting_max_new_tokens,
    sampling_params,
    take_in,
)
from services.gateway.dialects.openai import ChatRequest, CompletionRequest
from services.gateway.dialects.replies import Replies
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.wire import Response, dump
from shared import block_hash, telemetry
from shared import farspan_pb2 as pb
from shared.errors import DeadlineExceeded, FarspanError, WorkerLost

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout-s"
_SMALL_BODY_BYTES = 4 << 10  # tokenised in 3 ms; more would hold up the other streams
_GRACE_S = 1.0  # a client that reads too slowly is given up this long after the deadline
_LAST_WORD_S = 1.0  # and this long is tried to tell it why

Request = ChatRequest | CompletionRequest


@dataclass(frozen=True)
class Resources:
    """What every exchange works with."""

    config: GatewayConfig
    tokenizer: Tokenizer
    line: Line

    def max_tokens(self, now_s: float) -> int:
        """The most tokens a request can have, its answer included; 0 without workers."""
        held = self.line.fleet.max_sequence_tokens(now_s)
        return min(self.tokenizer.checkpoint.max_context_tokens, held)


@dataclass(frozen=True)
class Dialect:
    """What distinguishes one generating endpoint from another."""

    operation: str  # gen_ai.operation.name
    parse: Callable[[bytes], Request]
    replies: Callable[[str, bool], Replies]


class Exchange:
    """The state of one POST."""

    def __init__(
        self,
        resources: Resources,
        dialect: Dialect,
        response: Response,
        span: telemetry.Span,
        client_id: str,
    ) -> None:
        """`client_id` is what the client's response calls the exchange: its x-request-id."""
        self.request_id = uuid.uuid4().hex
        self._client_id = client_id
        self._resources = resources
        self._dialect = dialect
        self._response = response
        self._span = span
        self._begun_s = time.monotonic()

    async def run(self, body: bytes, headers: Headers) -> None:
        """Everything after the body was read."""
        deadline_s = self._begun_s + _timeout_s(headers, self._resources.config.deadline_s)
        loop_deadline = asyncio.get_running_loop().time() + deadline_s + _GRACE_S - self._begun_s
        try:
            async with asyncio.timeout_at(loop_deadline):
                request, intake, max_tokens = await self._take_in(body)
                job = self._job(request, intake, max_tokens, deadline_s)
                await self._generate(request, intake.answer, job)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed") from None

    async def fail(self, error: FarspanError) -> None:
        """Tell the client what went wrong, in the form its response has begun with."""
        failure = as_http(error)
        self._span.set(**{"error.type": str(failure.body["error"]["code"] or failure.status)})
        if failure.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._span.fail()  # ours, not the client's
        logger.info("%s failed with %d: %s", self.request_id, failure.status, error)
        if self._response.is_ended:
            return
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                if self._response.is_stream:
                    await self._response.end_stream(b"data: %s\n\n" % dump(failure.body))
                else:
                    await self._response.send_json(failure.status, failure.body, failure.headers)
        except TimeoutError:
            logger.warning("%s: the client does not read", self.request_id)

    async def _take_in(self, body: bytes) -> tuple[Request, Intake, int]:
        """The request, its tokens, and the most it may have: one limit for the whole of it."""
        is_small = len(body) < _SMALL_BODY_BYTES
        parse = self._dialect.parse
        request = parse(body) if is_small else await asyncio.to_thread(parse, body)
        line, tokenizer = self._resources.line, self._resources.tokenizer
        now_s = line.clock()
        self._check_servable(request, now_s)
        max_tokens = self._resources.max_tokens(now_s)
        namespace = block_hash.namespace(
            line.model, line.fleet.model_fingerprint(now_s), request.cache_salt or ""
        )
        arguments = (request, tokenizer, namespace, max_tokens)
        intake = take_in(*arguments) if is_small else await asyncio.to_thread(take_in, *arguments)
        return request, intake, max_tokens

    def _check_servable(self, request: Request, now_s: float) -> None:
        if request.model != self._resources.config.model_name:
            raise InvalidRequest(
                f"the model {request.model!r} does not exist",
                param="model",
                code="model_not_found",
                status=404,
            )
        line = self._resources.line
        if not line.bus.is_connected:
            raise WorkerLost("the gateway has no connection to the workers")
        missing = line.fleet.missing(now_s)
        if missing:
            raise WorkerLost(missing)

    def _job(self, request: Request, intake: Intake, max_tokens: int, deadline_s: float) -> Job:
        line, config, tokenizer = (
            self._resources.line,
            self._resources.config,
            self._resources.tokenizer,
        )
        max_new_tokens = fitting_max_new_tokens(
            intake.prompt.num_tokens,
            request.max_new_tokens,
            config.default_max_tokens,
            max_tokens,
        )
        sampling = sampling_params(request, tokenizer, max_new_tokens)
        self._span.set(**_request_attributes(sampling, request))
        remaining_s = deadline_s - line.clock()
        return Job(
            request_id=self.request_id,
            prompt=intake.prompt.token_bytes,
            block_hashes=intake.prompt.block_hashes,
            namespace=intake.prompt.namespace,
            sampling=sampling,
            deadline_s=deadline_s,
            deadline_unix_ms=int((time.time() + remaining_s) * 1000),
            priority=request.priority or 0,
        )

    async def _generate(self, request: Request, answer: Answer, job: Job) -> None:
        is_stream = bool(request.stream)
        replies = self._dialect.replies(
            self._resources.config.model_name, request.wants_usage and is_stream
        )
        job = replace(job, known_as=(replies.id, self._client_id))
        async with generation(self._resources.line, job) as live:
            if is_stream:
                await self._response.begin_stream()
            await self._read_answer(live, answer, replies)
        chunks = replies.chunks(answer.flush())
        reason = pb.FINISH_REASON_STOP if answer.is_stopped else live.finish_reason
        usage = replace(live.usage, completion_tokens=answer.num_tokens)
        if is_stream:
            chunks += replies.finish(reason)
            if request.wants_usage:
                chunks.append(replies.usage_chunk(usage))
            await self._response.events(chunks)
            await self._response.end_stream(b"data: [DONE]\n\n")
        else:
            await self._response.send_json(200, replies.whole(reason, usage))
        self._note_end(replies, usage, live.num_attempts)

    async def _read_answer(self, live: Generation, answer: Answer, replies: Replies) -> None:
        """Pass the answer on until its end or a stop string."""
        waiting = telemetry.start("gateway.first_token")
        try:
            async with aclosing(live.batches()) as batches:
                async for batch in batches:
                    if batch and not answer.num_tokens:
                        waiting.end()
                        waiting = telemetry.start("gateway.stream")
                        self._note_first_token()
                    chunks = replies.chunks(answer.feed(batch))
                    if self._response.is_stream:
                        await self._response.events(chunks)
                        await self._response.keep_alive()
                    if answer.is_stopped:
                        return
        finally:
            waiting.end()

    def _note_first_token(self) -> None:
        self._span.set(**{"gen_ai.response.time_to_first_chunk": time.monotonic() - self._begun_s})

    def _note_end(self, replies: Replies, usage: Usage, num_attempts: int) -> None:
        ended: dict[str, telemetry.AttributeValue] = {
            "gen_ai.response.id": replies.id,
            "gen_ai.response.model": self._resources.config.model_name,
            "gen_ai.response.finish_reasons": [replies.finish_word],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "farspan.num_attempts": num_attempts,
        }
        self._span.set(**ended)
        logger.info(
            "%s ended: %s, %d prompt tokens (%d cached), %d generated, %d attempts, %.3f s",
            self.request_id,
            replies.finish_word,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            num_attempts,
            time.monotonic() - self._begun_s,
        )


def _timeout_s(headers: Headers, longest_s: float) -> float:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return longest_s
    try:
        asked_s = float(text)
    except ValueError:
        asked_s = math.nan
    if not asked_s > 0:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be a positive number of seconds", code="invalid_value"
        )
    return min(asked_s, longest_s)


def _request_attributes(
    sampling: pb.SamplingParams, request: Request
) -> dict[str, telemetry.AttributeValue]:
    return {
        "gen_ai.request.stream": bool(request.stream),
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": str(
            sampling.seed
        ),  # unsigned 64 bits: an attribute's integer is signed
    }
