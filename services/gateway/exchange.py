"""One POST to a generating endpoint: read, validate, generate, answer, in one span.

Knows HTTP and the order of things; what each step means is elsewhere. Every exchange ends with a
whole response, an error object, or a client that left.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.answer import Answer
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
from services.gateway.openai import ChatRequest, CompletionRequest, parse
from services.gateway.replies import ChatReplies, CompletionReplies, Replies
from services.gateway.tokenizer import Tokenizer
from services.gateway.wire import Response, dump, read_body, until_gone
from shared import block_hash, telemetry
from shared import farspan_pb2 as pb
from shared.errors import Cancelled, DeadlineExceeded, FarspanError, WorkerLost

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout-s"
_SMALL_BODY_BYTES = (
    16 << 10
)  # tokenised in a millisecond or two, less than a thread's detour is worth
_GRACE_S = 1.0  # a client that reads too slowly is given up this long after the deadline
_LAST_WORD_S = 1.0  # and this long is tried to tell it why

Request = ChatRequest | CompletionRequest


@dataclass(frozen=True)
class Kitchen:
    """What every exchange works with."""

    config: GatewayConfig
    tokenizer: Tokenizer
    line: Line


@dataclass(frozen=True)
class Endpoint:
    """A generating endpoint: an ASGI application, one exchange a call."""

    kitchen: Kitchen
    operation: str  # gen_ai.operation.name
    parse: Callable[[bytes], Request]
    replies: Callable[[str, bool], Replies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to its end."""
        headers = Headers(scope=scope)
        response = Response(send)
        name = f"{self.operation} {self.kitchen.config.model_name}"
        with telemetry.attached(headers), telemetry.span(name, span_kind="server") as span:
            span.set(
                **{
                    "gen_ai.operation.name": self.operation,
                    "gen_ai.provider.name": "farspan",
                    "gen_ai.request.model": self.kitchen.config.model_name,
                }
            )
            exchange = Exchange(self, response, span)
            try:
                body = await read_body(receive, self.kitchen.config.max_body_bytes)
                await until_gone(exchange.run(body, headers), receive)
            except Cancelled as error:
                span.set(**{"error.type": "client_left"})
                logger.info("%s: %s", exchange.request_id, error)
            except FarspanError as error:
                await exchange.fail(error)
            except Exception:
                logger.exception("%s failed", exchange.request_id)
                await exchange.fail(FarspanError("internal error"))


class Exchange:
    """The state of one POST."""

    def __init__(self, endpoint: Endpoint, response: Response, span: telemetry.Span) -> None:
        self.request_id = uuid.uuid4().hex
        self._endpoint = endpoint
        self._kitchen = endpoint.kitchen
        self._response = response
        self._span = span
        self._begun_s = time.monotonic()

    async def run(self, body: bytes, headers: Headers) -> None:
        """Everything after the body was read."""
        deadline_s = self._begun_s + _timeout_s(headers, self._kitchen.config.deadline_s)
        loop_deadline = asyncio.get_running_loop().time() + deadline_s + _GRACE_S - self._begun_s
        try:
            async with asyncio.timeout_at(loop_deadline):
                request, intake = await self._take_in(body)
                job = self._job(request, intake, deadline_s)
                await self._generate(request, intake.answer, job)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed") from None

    async def fail(self, error: FarspanError) -> None:
        """Tell the client what went wrong, in the form its response has begun with."""
        failure = as_http(error)
        self._span.set(**{"error.type": str(failure.body["error"]["code"] or failure.status)})
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

    async def _take_in(self, body: bytes) -> tuple[Request, Intake]:
        request = self._endpoint.parse(body)
        self._check_servable(request)
        fleet, config = self._kitchen.line.fleet, self._kitchen.config
        fingerprint = fleet.model_fingerprint(self._kitchen.line.clock())
        namespace = block_hash.namespace(config.model_name, fingerprint, request.cache_salt or "")
        arguments = (request, self._kitchen.tokenizer, namespace)
        if len(body) < _SMALL_BODY_BYTES:
            return request, take_in(*arguments)
        return request, await asyncio.to_thread(take_in, *arguments)

    def _check_servable(self, request: Request) -> None:
        if request.model != self._kitchen.config.model_name:
            raise InvalidRequest(
                f"the model {request.model!r} does not exist",
                param="model",
                code="model_not_found",
                status=404,
            )
        line = self._kitchen.line
        if not line.bus.is_connected:
            raise WorkerLost("the gateway has no connection to the workers")
        missing = line.fleet.missing(line.clock())
        if missing:
            raise WorkerLost(missing)

    def _job(self, request: Request, intake: Intake, deadline_s: float) -> Job:
        line, config, tokenizer = self._kitchen.line, self._kitchen.config, self._kitchen.tokenizer
        max_new_tokens = fitting_max_new_tokens(
            intake.prompt.num_tokens,
            request.max_new_tokens,
            config.default_max_tokens,
            tokenizer.checkpoint.max_context_tokens,
            line.fleet.capacity(line.clock()),
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
        )

    async def _generate(self, request: Request, answer: Answer, job: Job) -> None:
        is_stream = bool(request.stream)
        replies = self._endpoint.replies(
            self._kitchen.config.model_name, request.wants_usage and is_stream
        )
        async with generation(self._kitchen.line, job) as live:
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
            "gen_ai.response.model": self._kitchen.config.model_name,
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


def chat_endpoint(kitchen: Kitchen) -> Endpoint:
    """POST /v1/chat/completions."""
    return Endpoint(kitchen, "chat", lambda body: parse(ChatRequest, body), ChatReplies)


def completion_endpoint(kitchen: Kitchen) -> Endpoint:
    """POST /v1/completions."""
    return Endpoint(
        kitchen, "text_completion", lambda body: parse(CompletionRequest, body), CompletionReplies
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
