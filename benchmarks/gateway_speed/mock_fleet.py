"""A router, a prefill and a decode worker in one process, as fast as the bus takes tokens.

The wire contract of a healthy fleet and nothing else: no cancels, no resends, no failures. Every
step of decode adds a token to each live answer, in one message, as the real one does.
"""

import asyncio
import itertools
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self

from benchmarks.gateway_speed.flow import CONTEXT, Flow, now_s
from shared import bus, subjects
from shared import farspan_pb2 as pb

_BEAT_S = 0.5
_IDLE_S = 0.0002
_MAX_TOKENS = 1 << 21
_EPOCH = time.time_ns()
_PREFILL = pb.WorkerRef(worker_id="mock-prefill", epoch=_EPOCH)
_DECODE = pb.WorkerRef(worker_id="mock-decode", epoch=_EPOCH)


class MockFleet:
    """The fleet's process."""

    def __init__(self, nats_url: str, model: str, token_ids: list[int], flow: Flow) -> None:
        """Answers are made of `token_ids`, over and over; each should be text of its own."""
        self._pipe, there = CONTEXT.Pipe()
        arguments = (there, nats_url, model, token_ids, flow)
        self._process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()

    def pace(self, tokens_per_s: float) -> None:
        """So many tokens a second and stream from now on; 0 = as fast as they are taken."""
        self._pipe.send(tokens_per_s)

    def sent_s(self) -> Mapping[str, list[float]]:
        """When each token of each answer was sent since the last call, by the client's id."""
        self._pipe.send(None)
        return self._pipe.recv()


@dataclass
class _Answer:
    request_id: str
    client_id: str
    gateway_id: str
    max_new_tokens: int
    sent_s: list[float] = field(default_factory=list)


def _serve(pipe: Connection, nats_url: str, model: str, token_ids: list[int], flow: Flow) -> None:
    async def main() -> None:
        async with bus.connect(nats_url, "mock fleet") as connection:
            await _Fleet(connection, model, token_ids, flow).run(pipe)

    asyncio.run(main())


class _Fleet:
    def __init__(self, connection: bus.Bus, model: str, token_ids: list[int], flow: Flow) -> None:
        self._bus = connection
        self._model = model
        self._words = [struct.pack("<I", token_id) for token_id in token_ids]
        self._flow = flow
        self._step_s = 0.0
        self._client_ids: dict[str, str] = {}
        self._live: dict[str, _Answer] = {}
        self._told: list[_Answer] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._num_sent = 0

    async def run(self, pipe: Connection) -> None:
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._obey, pipe)
        async with (
            self._bus.answer(subjects.PLACE, self._place, queue="router"),
            self._bus.answer(subjects.SUBMIT, self._submit, worker=_PREFILL.worker_id),
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._beat())
            tasks.create_task(self._decode())

    def _obey(self, pipe: Connection) -> None:
        asked = pipe.recv()
        if asked is None:
            pipe.send({answer.client_id: answer.sent_s for answer in self._told})
            self._told.clear()
        else:
            self._step_s = 1 / asked if asked else 0.0

    async def _place(self, request: pb.PlaceRequest) -> pb.PlaceReply:
        self._client_ids[request.request_id] = request.known_as[-1]
        placement = pb.Placement(prefill=_PREFILL, decode=_DECODE, reason="the only ones")
        return pb.PlaceReply(placement=placement)

    async def _submit(self, submit: pb.Submit) -> pb.SubmitReply:
        """Prefill takes no time: the first token is on its way before the answer to this."""
        client_id = self._client_ids.pop(submit.request_id)
        answer = _Answer(
            submit.request_id, client_id, submit.gateway_id, submit.sampling.max_new_tokens
        )
        self._told.append(answer)
        if not self._live:
            self._num_sent = self._flow.received.value
        await self._publish(answer.gateway_id, [self._next(answer, _PREFILL)])
        self._live[answer.request_id] = answer
        return pb.SubmitReply(accepted=pb.Accepted())

    async def _decode(self) -> None:
        """Steps for ever, at the pace asked for."""
        due_s = now_s()
        while True:
            if self._step_s:
                due_s = max(due_s + self._step_s, now_s() - self._step_s)
                await asyncio.sleep(due_s - now_s())
            elif not self._live or not self._flow.has_room(self._num_sent, len(self._live)):
                await asyncio.sleep(_IDLE_S)
                continue
            else:
                await asyncio.sleep(0)
            await self._step()

    async def _step(self) -> None:
        messages: dict[str, list[pb.Tokens]] = {}
        for answer in list(self._live.values()):
            if len(answer.sent_s) + 1 >= answer.max_new_tokens:
                self._finish(answer)
            else:
                messages.setdefault(answer.gateway_id, []).append(self._next(answer, _DECODE))
        for gateway_id, tokens in messages.items():
            await self._publish(gateway_id, tokens)

    def _next(self, answer: _Answer, sender: pb.WorkerRef) -> pb.Tokens:
        place = len(answer.sent_s)
        answer.sent_s.append(now_s())
        self._num_sent += 1
        return pb.Tokens(
            request_id=answer.request_id,
            sender=sender,
            index=place,
            token_ids=self._words[place % len(self._words)],
        )

    async def _publish(self, gateway_id: str, tokens: list[pb.Tokens]) -> None:
        await self._bus.publish(subjects.TOKENS, pb.TokenBatch(messages=tokens), gateway=gateway_id)

    def _finish(self, answer: _Answer) -> None:
        """The last token goes with the end, which is asked for until it is answered."""
        del self._live[answer.request_id]
        message = self._next(answer, _DECODE)
        message.end.reason = pb.FINISH_REASON_LENGTH
        task = asyncio.create_task(self._end(answer.gateway_id, message))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, gateway_id: str, message: pb.Tokens) -> None:
        needed = message.index + 1
        while True:
            reply = await self._bus.request(
                subjects.TOKENS_END, message, timeout_s=10, gateway=gateway_id
            )
            if reply.next_index >= needed:
                return
            await asyncio.sleep(0.02)

    async def _beat(self) -> None:
        for _ in itertools.count():
            for worker, role in ((_PREFILL, pb.ROLE_PREFILL), (_DECODE, pb.ROLE_DECODE)):
                beat = pb.Heartbeat(
                    worker=worker,
                    role=role,
                    state=pb.SERVICE_STATE_READY,
                    model=self._model,
                    layout=pb.KvLayout(model_fingerprint="mock"),
                    limits=pb.Limits(max_sequence_tokens=_MAX_TOKENS, max_concurrent=1024),
                )
                await self._bus.publish(subjects.HEARTBEAT, beat)
            await asyncio.sleep(_BEAT_S)
