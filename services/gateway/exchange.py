"""One POST to a generating endpoint, after its body was read: validate, generate, answer.

Knows the order of things; what each step means is elsewhere.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers

from services.gateway.ask import Ask
from services.gateway.attempt import Job, Line
from services.gateway.choices import Choice, Choices
from services.gateway.config import GatewayConfig
from services.gateway.dialects.dialect import Call, Dialect, Replies
from services.gateway.door.keys import salt
from services.gateway.failures import InvalidRequest, as_http, unknown_model
from services.gateway.intake import Intake, Limits, take_in
from services.gateway.ledger import Usage
from services.gateway.metrics import Metrics
from services.gateway.record import Books, Client, Record
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.timelines import Timelines
from services.gateway.wire import Response, dump, encoded
from services.gateway.workshop import SMALL_BYTES, Workshop
from shared import block_hash, telemetry
from shared.errors import DeadlineExceeded, FarspanError, WorkerLost

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_HEADER = "x-request-timeout-s"
SESSION_HEADERS = (
    "x-correlation-id",
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "x-session-affinity",
)
_MAX_SESSION_CHARACTERS = 256
_SMALL_BODY_BYTES = 8 << 10  # tokenised in 3 ms; more would hold up the other streams
_READ_AT_ONCE_BYTES = 16 << 10  # parsed in less than 1 ms; going to a thread takes 0.3 ms
_LONG_TOKENS = 4096  # of a whole response, which may tell as many logprobs
_GRACE_S = 1.0  # a client that reads too slowly is given up this long after the deadline
_LAST_WORD_S = 1.0  # and this long is tried to tell it why


@dataclass(frozen=True)
class Resources:
    """What every exchange works with."""

    config: GatewayConfig
    tokenizer: Tokenizer
    line: Line
    metrics: Metrics
    timelines: Timelines
    workshop: Workshop

    def limits(self, now_s: float) -> Limits:
        """What bounds a request now; no tokens at all without workers."""
        held = self.line.fleet.max_sequence_tokens(now_s)
        return Limits(
            max_tokens=min(self.tokenizer.checkpoint.max_context_tokens, held),
            max_prompt_tokens=self.config.max_prompt_tokens,
            default_new_tokens=self.config.default_max_tokens,
        )


class Exchange:
    """The state of one POST."""

    def __init__(
        self,
        resources: Resources,
        dialect: Dialect,
        response: Response,
        span: telemetry.Span,
        client: Client,
    ) -> None:
        self.request_id = uuid.uuid4().hex
        self._client = client
        self._resources = resources
        self._dialect = dialect
        self._response = response
        self._record = Record(
            Books(span, resources.metrics, resources.timelines),
            dialect.operation,
            self.request_id,
            client,
        )
        self._begun_s = time.monotonic()
        self._replies: Replies | None = None  # from when the request is understood

    async def run(self, body: bytes, headers: Headers) -> None:
        """Everything after the body was read."""
        deadline_s = self._begun_s + _timeout_s(headers, self._resources.config.deadline_s)
        loop_deadline = asyncio.get_running_loop().time() + deadline_s + _GRACE_S - self._begun_s
        try:
            async with asyncio.timeout_at(loop_deadline):
                call, intake = await self._take_in(body)
                session = call.ask.session or _session(headers)
                self._replies = replies = call.replies(self._resources.config.model_name)
                choices = self._choices(call.ask, intake, session, deadline_s, replies)
                await self._answer(call.ask, choices, replies)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed") from None

    async def fail(self, error: FarspanError) -> None:
        """Tell the client what went wrong, in the form its response has begun with."""
        failure = as_http(error)
        self._record.failed(failure)
        if self._response.is_ended:
            return
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                if self._response.is_stream and self._replies is not None:
                    events = self._replies.fail(failure)
                    await self._response.end_stream(b"".join(map(encoded, events)))
                else:
                    body = self._dialect.error(failure)
                    await self._response.send_json(failure.status, body, failure.headers)
        except TimeoutError:
            logger.warning("%s: the client does not read", self.request_id)

    def leave(self) -> None:
        """The client has closed its connection."""
        self._record.left()

    async def _take_in(self, body: bytes) -> tuple[Call, Intake]:
        """The request and its tokens: one limit for the whole of it."""
        is_small = len(body) < _SMALL_BODY_BYTES
        read = self._dialect.read
        is_read_at_once = len(body) < _READ_AT_ONCE_BYTES
        call = read(body) if is_read_at_once else await self._aside(len(body), read, body)
        line, tokenizer = self._resources.line, self._resources.tokenizer
        now_s = line.clock()
        self._check_servable(call.ask, now_s)
        self._client.visit.check_priority(call.ask.priority)
        namespace = block_hash.namespace(
            line.model,
            line.fleet.model_fingerprint(now_s),
            salt(self._client.tenant, call.ask.cache_salt),
        )
        arguments = (
            call.ask,
            tokenizer,
            self._client.tenant,
            namespace,
            self._resources.limits(now_s),
        )
        has_grammar = call.ask.has_form  # compiling it may take longer than the loop can wait
        if is_small and not has_grammar:
            intake = take_in(*arguments)
        else:
            num_bytes = max(len(body), SMALL_BYTES if has_grammar else 0)  # it may take as long
            intake = await self._aside(num_bytes, take_in, *arguments)
        num_tokens = sum(prompt.num_tokens for prompt in intake.prompts)
        self._client.visit.note_prompt(num_tokens, time.monotonic())
        return call, intake

    async def _aside(self, num_bytes: int, work: Callable[..., T], *given: Any) -> T:
        """What `work` gives, without holding up the loop."""
        return await self._resources.workshop.run(self._client.tenant, num_bytes, work, *given)

    def _check_servable(self, ask: Ask, now_s: float) -> None:
        if ask.model != self._resources.config.model_name:
            raise unknown_model(ask.model)
        line = self._resources.line
        if not line.bus.is_connected:
            raise WorkerLost("the gateway has no connection to the workers")
        missing = line.fleet.missing(now_s)
        if missing:
            raise WorkerLost(missing)

    def _choices(
        self, ask: Ask, intake: Intake, session: str, deadline_s: float, replies: Replies
    ) -> Choices:
        line = self._resources.line
        remaining_s = deadline_s - line.clock()
        deadline_unix_ms = int((time.time() + remaining_s) * 1000)
        choices = []
        for number, sampling in enumerate(intake.samplings):
            prompt = intake.prompts[number // ask.num_choices]
            job = Job(
                request_id=f"{self.request_id}-c{number}" if number else self.request_id,
                prompt=prompt.token_bytes,
                block_hashes=prompt.block_hashes,
                namespace=prompt.namespace,
                sampling=sampling,
                deadline_s=deadline_s,
                deadline_unix_ms=deadline_unix_ms,
                priority=ask.priority,
                session=session,
                known_as=(replies.id, self._client.request_id),
            )
            place = number // ask.num_choices
            echo = intake.echoes[place] if intake.echoes else None
            choices.append(Choice(job, intake.new_answer(), place, echo))
        self._record.accepted(ask, intake.samplings[0], session, replies.id)
        return Choices(line, choices, replies, self._response, self._client.visit.leave_queue)

    async def _answer(self, ask: Ask, choices: Choices, replies: Replies) -> None:
        try:
            await choices.run(is_stream=ask.is_stream)
        finally:
            self._record.generated(choices)
        usage = choices.usage
        if ask.is_stream:
            await self._response.events(replies.end(usage))
            await self._response.end_stream(self._dialect.last_words)
        else:
            if usage.total_tokens > _LONG_TOKENS:
                told = await self._aside(SMALL_BYTES, _told, replies, usage)
            else:
                told = _told(replies, usage)
            await self._response.send_json(200, told)
        self._record.answered(replies, choices, ask.model)


def _told(replies: Replies, usage: Usage) -> bytes:
    return dump(replies.whole(usage))


def _session(headers: Headers) -> str:
    """What the client calls its conversation, where any of the usual headers says so."""
    found = (headers.get(name, "") for name in SESSION_HEADERS)
    return next((text for text in found if text), "")[:_MAX_SESSION_CHARACTERS]


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
