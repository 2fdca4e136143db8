"""Stand-ins that keep the wire contract over the real bus: a router and workers with a plan."""

import asyncio
import itertools
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import token_bytes, token_ids
from shared.bus import Bus
from shared.errors import FarspanError, WorkerLost

BEAT_S = 0.1
_epochs = itertools.count(time.time_ns())


@dataclass
class Plan:
    """What happens to one attempt. Counts are of the tokens that the attempt has sent."""

    answer: list[int]  # of the whole request; a resumed attempt continues in it
    reason: pb.FinishReason = pb.FINISH_REASON_STOP
    cached_tokens: int = 0
    refuse: pb.Failure | None = None  # the answer to the submit
    hold_at: int | None = None  # wait here until cancelled or `FakeFleet.release`
    die_at: int | None = None  # here the decode worker falls silent
    fail_at: int | None = None  # here the decode worker ends the answer with `failure`
    failure: pb.Failure | None = None
    lost: frozenset[int] = frozenset()  # messages that get lost the first time
    sends_twice: bool = False
    prefill_stages: tuple[pb.Stage, ...] = ()  # told with the first token
    decode_stages: tuple[pb.Stage, ...] = ()  # and with the end


@dataclass
class FakeWorker:
    """A worker as far as the fleet sees it."""

    role: pb.Role
    ref: pb.WorkerRef
    max_sequence_tokens: int = 100_000
    state: pb.ServiceState = pb.SERVICE_STATE_READY
    is_alive: bool = True
    load: pb.Load = field(default_factory=pb.Load)

    @property
    def id(self) -> str:
        return self.ref.worker_id


@dataclass
class FakeFleet:
    """One router and any number of workers; everything they are told is kept."""

    bus: Bus
    model: str
    plans: list[Plan] = field(default_factory=list)  # one an attempt; the last one stays
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    place_failure: pb.Failure | None = None
    places: list[pb.PlaceRequest] = field(default_factory=list)
    submits: list[pb.Submit] = field(default_factory=list)
    cancels: list[tuple[str, str]] = field(default_factory=list)  # (worker id, request id)
    ended: list[str] = field(default_factory=list)
    resends: list[tuple[str, int]] = field(default_factory=list)  # (worker id, from index)
    final_replies: list[int] = field(default_factory=list)
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _playing: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _sent: dict[str, tuple[pb.Submit, list[int]]] = field(default_factory=dict)
    _planned: dict[str, Plan] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeFleet"]:
        """Inside the block the router answers; workers are added with `add`."""
        async with self._stack:
            enter = self._stack.enter_async_context
            await enter(self.bus.answer(subjects.PLACE, self._place, queue="router"))
            await enter(self.bus.listen(subjects.PLACEMENT_ENDED, self._ended))
            beating = asyncio.create_task(self._beat())
            try:
                yield self
            finally:
                tasks = [beating, *self._playing.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def add(self, role: pb.Role, worker_id: str, **settings: int) -> FakeWorker:
        """A worker that lives from now on; an old id gets a new epoch."""
        is_new = worker_id not in self.workers
        worker = FakeWorker(
            role, pb.WorkerRef(worker_id=worker_id, epoch=next(_epochs)), **settings
        )
        self.workers[worker_id] = worker
        if is_new:
            enter = self._stack.enter_async_context
            answer, listen = self.bus.answer, self.bus.listen

            async def cancel(message: pb.Cancel) -> None:
                self._cancel(worker_id, message)

            async def resend(message: pb.ResendTokens) -> None:
                await self._resend(worker_id, message)

            await enter(listen(subjects.CANCEL, cancel, worker=worker_id))
            await enter(listen(subjects.RESEND_TOKENS, resend, worker=worker_id))
            if role == pb.ROLE_PREFILL:
                await enter(answer(subjects.SUBMIT, self._submit, worker=worker_id))
        await self._publish_heartbeat(worker)
        return worker

    async def add_pair(self, number: int = 0) -> None:
        """One prefill and one decode worker."""
        await self.add(pb.ROLE_PREFILL, f"p{number}")
        await self.add(pb.ROLE_DECODE, f"d{number}")

    def release(self) -> None:
        """Let the held attempts go on."""
        self._released.set()

    def live(self, role: pb.Role) -> list[FakeWorker]:
        return [w for w in self.workers.values() if w.role == role and w.is_alive]

    async def _place(self, request: pb.PlaceRequest) -> pb.PlaceReply:
        self.places.append(request)
        if self.place_failure is not None:
            return pb.PlaceReply(failure=self.place_failure)
        excluded = {(ref.worker_id, ref.epoch) for ref in request.excluded}
        chosen = {}
        for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
            usable = [w for w in self.live(role) if (w.id, w.ref.epoch) not in excluded]
            if not usable:
                message = f"no {pb.Role.Name(role)} left"
                failure = pb.Failure(kind=pb.FAILURE_KIND_WORKER_LOST, message=message)
                return pb.PlaceReply(failure=failure)
            chosen[role] = usable[0].ref
        placement = pb.Placement(
            prefill=chosen[pb.ROLE_PREFILL], decode=chosen[pb.ROLE_DECODE], reason="the first"
        )
        return pb.PlaceReply(placement=placement)

    async def _ended(self, message: pb.PlacementEnded) -> None:
        self.ended.append(message.request_id)

    async def _submit(self, submit: pb.Submit) -> pb.SubmitReply:
        self.submits.append(submit)
        plan = self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]
        if plan.refuse is not None:
            return pb.SubmitReply(failure=plan.refuse)
        self._planned[submit.request_id] = plan
        self._playing[submit.request_id] = asyncio.create_task(self._play(submit, plan))
        return pb.SubmitReply(accepted=pb.Accepted())

    async def _play(self, submit: pb.Submit, plan: Plan) -> None:
        first = submit.num_resumed_tokens
        tokens = plan.answer[first : first + submit.sampling.max_new_tokens]
        self._sent[submit.request_id] = (submit, sent := [])
        for place, token in enumerate(tokens):
            if await self._interrupt(submit, plan, place):
                return
            sent.append(token)
            cached = plan.cached_tokens if place == 0 else 0
            if place not in plan.lost:
                for _ in range(2 if plan.sends_twice else 1):
                    await self._send(submit, place, [token], cached)
        if await self._interrupt(submit, plan, len(tokens)):
            return
        was_cut = len(plan.answer) > first + len(tokens)
        reason = pb.FINISH_REASON_LENGTH if was_cut else plan.reason
        usage = pb.Usage(prompt_tokens=1, cached_tokens=plan.cached_tokens)
        await self._end(submit, tokens, pb.End(reason=reason, usage=usage))

    async def _interrupt(self, submit: pb.Submit, plan: Plan, place: int) -> bool:
        if plan.hold_at == place:
            await self._released.wait()
        if plan.die_at == place:
            self.workers[submit.decode.worker_id].is_alive = False
            return True
        if plan.fail_at == place:
            end = pb.End(reason=pb.FINISH_REASON_FAILED, failure=plan.failure)
            await self._end(submit, plan.answer[submit.num_resumed_tokens :][:place], end)
            return True
        return False

    async def _end(self, submit: pb.Submit, tokens: list[int], end: pb.End) -> None:
        """Repeat the end until the gateway has everything, as the contract demands."""
        first = submit.num_resumed_tokens
        total = next_index = first + len(tokens)
        while True:
            message = pb.Tokens(
                request_id=submit.request_id,
                sender=submit.decode if len(tokens) > 1 else submit.prefill,
                index=next_index,
                token_ids=token_bytes(tokens[next_index - first :]),
                end=end,
                logprobs=logprobs_of(tokens[next_index - first :], submit.sampling),
                stages=self._planned[submit.request_id].decode_stages,
            )
            try:
                reply = await self.bus.request(
                    subjects.TOKENS_END, message, timeout_s=2, gateway=submit.gateway_id
                )
            except WorkerLost:
                await asyncio.sleep(BEAT_S)
                continue
            next_index = reply.next_index
            if next_index == total:
                self.final_replies.append(next_index)
                return

    async def _send(self, submit: pb.Submit, place: int, tokens: list[int], cached: int) -> None:
        message = pb.Tokens(
            request_id=submit.request_id,
            sender=submit.prefill if place == 0 else submit.decode,
            index=submit.num_resumed_tokens + place,
            token_ids=token_bytes(tokens),
            cached_tokens=cached,
            logprobs=logprobs_of(tokens, submit.sampling),
            stages=self._planned[submit.request_id].prefill_stages if place == 0 else (),
        )
        if place == 0 and submit.sampling.HasField("num_prompt_logprobs"):
            num_top = submit.sampling.num_prompt_logprobs
            prompt = token_ids(submit.token_ids)
            message.prompt_logprobs.CopyFrom(logprobs(prompt, num_top, is_prompt=True))
        batch = pb.TokenBatch(messages=[message])
        await self.bus.publish(subjects.TOKENS, batch, gateway=submit.gateway_id)

    async def _resend(self, worker_id: str, message: pb.ResendTokens) -> None:
        self.resends.append((worker_id, message.from_index))
        submit, sent = self._sent[message.request_id]
        place = message.from_index - submit.num_resumed_tokens
        is_prefill = worker_id == submit.prefill.worker_id
        tokens = sent[:1][place:] if is_prefill else sent[place:]
        if tokens:
            await self._send(submit, place, tokens, 0)

    def _cancel(self, worker_id: str, message: pb.Cancel) -> None:
        self.cancels.append((worker_id, message.request_id))
        if message.request_id in self._playing:
            self._playing[message.request_id].cancel()

    async def _beat(self) -> None:
        while True:
            for worker in list(self.workers.values()):
                if worker.is_alive:
                    await self._publish_heartbeat(worker)
            await asyncio.sleep(BEAT_S)

    async def _publish_heartbeat(self, worker: FakeWorker) -> None:
        beat = pb.Heartbeat(
            worker=worker.ref,
            role=worker.role,
            state=worker.state,
            model=self.model,
            layout=pb.KvLayout(model_fingerprint="f1"),
            limits=pb.Limits(max_sequence_tokens=worker.max_sequence_tokens, max_concurrent=8),
            load=worker.load,
        )
        try:
            await self.bus.publish(subjects.HEARTBEAT, beat)
        except FarspanError:
            return  # a test has stopped the server


def logprobs_of(tokens: list[int], sampling: pb.SamplingParams) -> pb.TokenLogprobs | None:
    """What a worker would send with these tokens of an answer."""
    if not sampling.HasField("num_logprobs"):
        return None
    return logprobs(tokens, sampling.num_logprobs)


def logprobs(tokens: list[int], num_top: int, *, is_prompt: bool = False) -> pb.TokenLogprobs:
    """Made up: a token's logprob is minus a hundredth of its id; the likeliest are 0, 1, 2..."""
    chosen = [-token / 100 for token in tokens]
    top = [-float(place) for place in range(num_top)] * len(tokens)
    if is_prompt:
        chosen[0] = float("nan")
        top[:num_top] = [float("nan")] * num_top
    return pb.TokenLogprobs(
        num_top=num_top,
        chosen=array("f", chosen).tobytes(),
        top_token_ids=array("I", list(range(num_top)) * len(tokens)).tobytes(),
        top_logprobs=array("f", top).tobytes(),
    )
