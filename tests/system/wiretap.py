"""Hears a stack's workers on its bus: the token ids of every answer, and their heartbeats.

The public API gives text, and two answers of different tokens may read the same.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from shared import block_hash, bus, subjects
from shared import farspan_pb2 as pb
from shared.subjects import Subject

_PATIENCE_S = 10.0


class Wiretap:
    """What was heard since it began."""

    def __init__(self) -> None:
        self._last_request: dict[bytes, str] = {}  # by the prompt's token ids
        self._answers: defaultdict[str, dict[int, int]] = defaultdict(dict)  # by place
        self._heartbeats: dict[pb.Role, pb.Heartbeat] = {}
        self._heard = asyncio.Condition()

    async def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The token ids of the last answer to this prompt, once there are num_tokens."""
        key = block_hash.token_bytes(prompt)

        def heard() -> dict[int, int]:
            return self._answers[self._last_request.get(key, "")]

        await self._until(lambda: len(heard()) >= num_tokens)
        return [token for _, token in sorted(heard().items())]

    async def load(self, role: pb.Role) -> pb.Load:
        """What the worker of that role says next about its work."""
        self._heartbeats.pop(role, None)
        await self._until(lambda: role in self._heartbeats)
        return self._heartbeats[role].load

    async def on_submit(self, submit: pb.Submit) -> None:
        """A request was given to a prefill worker."""
        async with self._heard:
            self._last_request[submit.token_ids] = submit.request_id

    async def on_batch(self, batch: pb.TokenBatch) -> None:
        """Parts of answers were sent."""
        for tokens in batch.messages:
            await self.on_tokens(tokens)

    async def on_tokens(self, tokens: pb.Tokens) -> None:
        """A part of an answer was sent, with or without its end."""
        async with self._heard:
            ids = block_hash.token_ids(tokens.token_ids)
            self._answers[tokens.request_id].update(enumerate(ids, tokens.index))
            self._heard.notify_all()

    async def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        """A worker said how it is."""
        async with self._heard:
            self._heartbeats[heartbeat.role] = heartbeat
            self._heard.notify_all()

    async def _until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(_PATIENCE_S), self._heard:
            await self._heard.wait_for(is_true)


@asynccontextmanager
async def tap(nats_url: str) -> AsyncIterator[Wiretap]:
    """A wiretap that hears everything said while inside the block."""
    heard = Wiretap()
    submit = Subject(subjects.SUBMIT.template, pb.Submit)
    end = Subject(subjects.TOKENS_END.template, pb.Tokens)
    async with bus.connect(nats_url, "wiretap") as link, AsyncExitStack() as stack:
        for listening in (
            link.listen(submit, heard.on_submit, worker="*"),
            link.listen(subjects.TOKENS, heard.on_batch, gateway="*"),
            link.listen(end, heard.on_tokens, gateway="*"),
            link.listen(subjects.HEARTBEAT, heard.on_heartbeat),
        ):
            await stack.enter_async_context(listening)
        yield heard
