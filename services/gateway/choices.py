"""All answers of one request: generated side by side, told to one client, counted in one ledger.

Knows neither bodies nor headers. An answer that fails fails the request, and ends the others.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from services.gateway.attempt import Job, Line
from services.gateway.dialects.dialect import Ending, Event, Opening, Replies
from services.gateway.generation import Generation, generation
from services.gateway.inbox import Batch
from services.gateway.intake import Echo
from services.gateway.ledger import Usage, total
from services.gateway.text.answer import Answer, Delta, TokenLogprob
from services.gateway.text.glm import Content
from services.gateway.wire import Response
from shared import farspan_pb2 as pb
from shared import telemetry
from shared.errors import FarspanError

_AT_ONCE = 32  # answers of one request: all 256 would be refused for a queue of their own making
_LONG_ECHO_TOKENS = 256  # told in 2 ms; more would hold up the other streams


@dataclass
class Choice:
    """One answer."""

    job: Job
    answer: Answer
    prompt: int  # number of its prompt
    echo: Echo | None = None
    live: Generation | None = None

    def usage(self) -> Usage:
        """What it has cost so far; before it was accepted, its prompt."""
        if self.live is None:
            return Usage(self.job.num_prompt_tokens)
        return replace(
            self.live.usage,
            completion_tokens=self.answer.num_tokens,
            reasoning_tokens=self.answer.num_reasoning_tokens,
        )


class Choices:
    """Use `run` once; then `usage` and `num_attempts` are final."""

    def __init__(
        self,
        line: Line,
        choices: Sequence[Choice],
        replies: Replies,
        response: Response,
        on_first_token: Callable[[], None],
    ) -> None:
        self.first_token_at_s: float | None = None  # on the line's clock
        self._line = line
        self._choices = choices
        self._replies = replies
        self._response = response
        self._on_first_token = on_first_token
        self._num_accepted = 0
        self._first_accepted = asyncio.Event()
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._is_begun = False

    @property
    def usage(self) -> Usage:
        """The request's: each prompt once, and as its luckiest answer found it least cached."""
        prompts: dict[int, Usage] = {}
        for choice in self._choices:
            usage = replace(choice.usage(), completion_tokens=0, reasoning_tokens=0)
            known = prompts.setdefault(choice.prompt, usage)
            if usage.cached_tokens < known.cached_tokens:
                prompts[choice.prompt] = usage
        answers = (
            replace(choice.usage(), prompt_tokens=0, cached_tokens=0) for choice in self._choices
        )
        return total([*prompts.values(), *answers])

    @property
    def num_attempts(self) -> int:
        """Of the answer that took most."""
        return max((choice.live.num_attempts for choice in self._choices if choice.live), default=0)

    @property
    def stages(self) -> list[tuple[int, str, pb.Stage]]:
        """What workers have told of the answers: (attempt, worker's id, stage)."""
        return [stage for choice in self._choices if choice.live for stage in choice.live.stages]

    async def run(self, *, is_stream: bool) -> None:
        """Every answer, from its acceptance to its end; some at once, the others as these end.

        A stream begins when the first of them are all accepted. Raises what ends the first that
        fails.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(self._choices)):
                    group.create_task(self._run(number, is_stream))
        except BaseExceptionGroup as failed:
            raise _first(failed) from None

    async def _run(self, number: int, is_stream: bool) -> None:
        choice = self._choices[number]
        async with self._places, generation(self._line, choice.job) as live:
            choice.live = live
            await self._wait_for_first(is_stream)
            await self._read(number, live)
        await self._response.events(self._finished(number, live))

    async def _wait_for_first(self, is_stream: bool) -> None:
        """Until as many as go at once are accepted: a refusal can still be a status then."""
        self._num_accepted += 1
        if self._num_accepted == min(_AT_ONCE, len(self._choices)):
            if is_stream:
                await self._response.begin_stream()
            self._first_accepted.set()
        await self._first_accepted.wait()

    async def _read(self, number: int, live: Generation) -> None:
        """Pass an answer on until its end or a stop."""
        answer = self._choices[number].answer
        waiting = telemetry.start("gateway.first_token")
        try:
            async with aclosing(live.batches()) as batches:
                async for batch in batches:
                    if not batch.token_ids:
                        await self._response.keep_alive()
                        continue
                    events: list[Event] = []
                    if not answer.num_tokens:
                        waiting.end()
                        waiting = telemetry.start("gateway.stream")
                        events = self._opening() + await self._echoed(number, live)
                    events += self._fed(number, batch)
                    if events:
                        await self._response.events(events)
                    else:  # of a long call nothing is told before its end
                        await self._response.keep_alive()
                    if answer.is_stopped:
                        break
        finally:
            waiting.end()

    def _opening(self) -> list[Event]:
        """What comes before the first token of the first choice."""
        if self._is_begun:
            return []
        self._is_begun = True
        self.first_token_at_s = self._line.clock()
        self._on_first_token()
        usage = replace(self.usage, completion_tokens=0, reasoning_tokens=0)
        return self._replies.begin(Opening(usage))

    async def _echoed(self, number: int, live: Generation) -> list[Event]:
        """A choice's prompt, where it is shown."""
        choice = self._choices[number]
        if choice.echo is None:
            return []

        def feed() -> list[Event]:
            assert choice.echo is not None
            return self._replies.feed(number, _echoed(choice.echo, choice.answer, live))

        is_long = len(choice.echo.token_ids) > _LONG_ECHO_TOKENS
        return await asyncio.to_thread(feed) if is_long else feed()

    def _fed(self, number: int, batch: Batch) -> list[Event]:
        """One event a token, unless the client reads too slowly for that.

        Always one where logprobs are told: which text they belong to must not depend on batches.
        """
        answer = self._choices[number].answer
        ids, logprobs = batch.token_ids, batch.logprobs
        is_together = not self._response.is_stream or self._response.is_lagging
        if len(ids) == 1 or (is_together and not logprobs):
            return self._replies.feed(number, answer.feed(ids, logprobs))
        events: list[Event] = []
        for place, token_id in enumerate(ids):
            delta = answer.feed((token_id,), logprobs[place : place + 1])
            events += self._replies.feed(number, delta)
        return events

    def _finished(self, number: int, live: Generation) -> list[Event]:
        answer = self._choices[number].answer
        events = self._opening()
        reason = pb.FINISH_REASON_STOP if answer.is_stopped else live.finish_reason
        events += self._replies.feed(number, answer.flush())
        return events + self._replies.finish(number, Ending(reason, answer.stop))


def _echoed(echo: Echo, answer: Answer, live: Generation) -> Delta:
    """A prompt as a piece of text. Raises FarspanError if its logprobs did not come."""
    logprobs: list[TokenLogprob] = []
    if echo.token_ids:
        pairs = zip(echo.token_ids, live.prompt_logprobs, strict=True)
        logprobs = [answer.described(token_id, raw) for token_id, raw in pairs]
    return Delta([Content(echo.text)], logprobs)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to tell: of several, one that has words for a client."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, FarspanError)), leaves[0])
