"""What one exchange leaves behind: span, metrics, timeline and log line, all from one ledger.

Knows no secrets and no prompts, and keeps it so.
"""

import logging
import time
from dataclasses import dataclass
from http import HTTPStatus

from services.gateway.ask import Ask
from services.gateway.choices import Choices
from services.gateway.dialects.dialect import Replies
from services.gateway.door.limits import Visit
from services.gateway.failures import HttpFailure
from services.gateway.metrics import Metrics
from services.gateway.timelines import Timeline, Timelines
from shared import farspan_pb2 as pb
from shared import telemetry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Client:
    """Who asks."""

    tenant: str  # apart from all others: neither blocks nor times are shared
    request_id: str  # what its response calls the exchange: x-request-id
    visit: Visit  # what it may use


@dataclass(frozen=True)
class Books:
    """Where it is written."""

    span: telemetry.Span
    metrics: Metrics
    timelines: Timelines


class Record:
    """One exchange's. It ends with exactly one of `answered`, `failed` and `left`."""

    def __init__(self, books: Books, operation: str, request_id: str, client: Client) -> None:
        self._books = books
        self._operation = operation
        self._request_id = request_id
        self._begun_s = time.monotonic()
        self._timeline = Timeline(client.request_id, client.tenant, _now_unix_us())

    def accepted(
        self, ask: Ask, sampling: pb.SamplingParams, session: str, response_id: str
    ) -> None:
        """What was asked for."""
        self._books.timelines.add(self._timeline, (response_id,))
        attributes: dict[str, telemetry.AttributeValue] = {
            "gen_ai.request.stream": ask.is_stream,
            "gen_ai.request.choice.count": ask.num_choices,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            # Unsigned 64 bits: an attribute's integer is signed.
            "gen_ai.request.seed": str(sampling.seed),
        }
        if session:
            attributes["gen_ai.conversation.id"] = session
        self._books.span.set(**attributes)

    def generated(self, choices: Choices) -> None:
        """What its workers did, whether they came to the end or not."""
        timeline = self._timeline
        timeline.attempts = choices.num_attempts
        timeline.usage = choices.usage
        for attempt, worker_id, stage in choices.stages:
            timeline.note_stages([stage], worker_id, attempt)
        if choices.first_token_at_s is not None:
            elapsed_s = choices.first_token_at_s - self._begun_s
            timeline.first_token_unix_us = timeline.begin_unix_us + round(elapsed_s * 1e6)
            self._books.span.set(**{"gen_ai.response.time_to_first_chunk": elapsed_s})
            self._books.metrics.first_token(elapsed_s)

    def answered(self, replies: Replies, choices: Choices, model: str) -> None:
        """It was answered, at this cost."""
        usage, words = choices.usage, replies.finish_words
        ended: dict[str, telemetry.AttributeValue] = {
            "gen_ai.response.id": replies.id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": words,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
            "farspan.num_attempts": choices.num_attempts,
        }
        self._books.span.set(**ended)
        self._books.metrics.served(usage)
        self._end("ok")
        logger.info(
            "%s ended: %s, %d prompt tokens (%d cached), %d generated (%d reasoning),"
            " %d attempts, %.3f s",
            self._request_id,
            ",".join(words),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
            choices.num_attempts,
            time.monotonic() - self._begun_s,
        )

    def failed(self, failure: HttpFailure) -> None:
        """It was refused, or came to nothing."""
        outcome = failure.code or str(int(failure.status))
        words = outcome  # a refusal's message may hold the client's own
        self._books.span.set(**{"error.type": outcome})
        if failure.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._books.span.fail()  # ours, not the client's
            words = failure.message
        self._end(outcome)
        logger.info("%s failed with %d: %s", self._request_id, failure.status, words)

    def left(self) -> None:
        """Its client has closed the connection."""
        self._books.span.set(**{"error.type": "client_left"})
        self._end("client_left")
        logger.info("%s: the client left", self._request_id)

    def _end(self, outcome: str) -> None:
        self._timeline.end_unix_us = _now_unix_us()
        self._books.metrics.ended(self._operation, outcome, time.monotonic() - self._begun_s)


def _now_unix_us() -> int:
    return time.time_ns() // 1000
