"""What stands around a prefill worker in its tests: an engine under control, a decode worker and a
gateway on the real bus.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.prefill import app
from services.prefill.app import Prefill
from services.prefill.config import PrefillConfig
from services.prefill.heartbeats import Heartbeats
from shared import block_hash, bus, subjects, tasks
from shared import farspan_pb2 as pb
from shared.block_hash import token_bytes, token_ids
from shared.bus import Bus
from shared.engine.step import PrefillStep, Sampled, Sampling, StepResult

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "demo-fp8"
MODEL = "demo"
ROOT = block_hash.namespace(MODEL, "f1")
WAIT_S = 20.0


class FakeEngine:
    """Computes nothing; draws `token_id` for whoever is complete. `hold` stops it before a step."""

    def __init__(self) -> None:
        self.regions: Sequence[pb.RankRegions] = [pb.RankRegions(agent_name="rank-0")]
        self.layout = pb.KvLayout(model_fingerprint="f1", dcp_size=1, interleave=64)
        self.vocab_size = 1000
        self.max_position = 4096
        self.token_id = 7
        self.steps: list[PrefillStep] = []
        self.error: Exception | None = None
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.is_running = False
        self.is_stepwise = False  # hold again after each step

    def hold(self) -> None:
        self.may_run.clear()

    async def run(self, step: PrefillStep) -> StepResult:
        self.steps.append(step)
        self.is_running = True
        await self.may_run.wait()
        if self.is_stepwise:
            self.hold()
        self.is_running = False
        if self.error is not None:
            raise self.error
        sampled = {c.request_id: self._drawn(c.sampling) for c in step.chunks if c.sampling}
        return StepResult(
            sampled,
            {
                c.request_id: made_up(len(c.token_ids) - 1, c.num_prompt_logprobs)
                for c in step.chunks
                if c.num_prompt_logprobs is not None
            },
        )

    def _drawn(self, sampling: Sampling) -> Sampled:
        num_top = sampling.num_logprobs
        told = None if num_top is None else made_up(1, num_top)
        return Sampled(self.token_id, b"hidden", told)

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()


def made_up(num_tokens: int, num_top: int) -> pb.TokenLogprobs:
    """Logprobs of the right size."""
    return pb.TokenLogprobs(
        num_top=num_top,
        chosen=bytes(4 * num_tokens),
        top_token_ids=bytes(4 * num_top * num_tokens),
        top_logprobs=bytes(4 * num_top * num_tokens),
    )


@dataclass
class DecodeSide:
    """A decode worker; what it says to an offer and to PREFILL_DONE is the test's choice."""

    bus: Bus
    ref: pb.WorkerRef
    refusal: pb.Failure | None = None
    done_error: Exception | None = None
    is_deaf_to_done: bool = False
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    offers: list[pb.HandoffOffer] = field(default_factory=list)
    chunks: list[pb.ChunkReady] = field(default_factory=list)
    dones: list[pb.PrefillDone] = field(default_factory=list)
    aborts: list[pb.Abort] = field(default_factory=list)
    _is_over: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["DecodeSide"]:
        self.may_answer.set()
        at = {"worker": self.ref.worker_id}
        async with (
            self.bus.answer(subjects.OFFER, self._on_offer, **at),
            self.bus.answer(subjects.PREFILL_DONE, self._on_done, **at),
            self.bus.listen(subjects.CHUNK_READY, self._on_chunk, **at),
            self.bus.listen(subjects.ABORT, self._on_abort, **at),
        ):
            yield self
            self.may_answer.set()
            self._is_over.set()

    async def release(self, prefill: pb.WorkerRef, request_id: str = "r") -> None:
        message = pb.Release(request_id=request_id, decode=self.ref)
        await self.bus.publish(subjects.RELEASE, message, worker=prefill.worker_id)

    async def renew(self, prefill: pb.WorkerRef, request_id: str = "r") -> None:
        message = pb.LeaseRenewal(request_ids=[request_id], decode=self.ref)
        await self.bus.publish(subjects.LEASE_RENEWAL, message, worker=prefill.worker_id)

    async def abort(self, prefill: pb.WorkerRef, kind: pb.FailureKind) -> None:
        failure = pb.Failure(kind=kind, message="decode failed")
        message = pb.Abort(request_id="r", sender=self.ref, failure=failure)
        await self.bus.publish(subjects.ABORT, message, worker=prefill.worker_id)

    async def _on_offer(self, offer: pb.HandoffOffer) -> pb.HandoffReply:
        self.offers.append(offer)
        await self.may_answer.wait()
        if self.refusal is not None:
            return pb.HandoffReply(failure=self.refusal)
        return pb.HandoffReply(accepted=pb.HandoffAccepted(held_tokens=0))

    async def _on_done(self, done: pb.PrefillDone) -> pb.Accepted:
        self.dones.append(done)
        if self.done_error is not None:
            raise self.done_error
        if self.is_deaf_to_done:
            await self._is_over.wait()
        return pb.Accepted()

    async def _on_chunk(self, chunk: pb.ChunkReady) -> None:
        self.chunks.append(chunk)

    async def _on_abort(self, abort: pb.Abort) -> None:
        self.aborts.append(abort)


@dataclass
class GatewaySide:
    """A gateway: keeps what arrives; deaf to ends while `is_deaf`."""

    bus: Bus
    id: str
    tokens: list[pb.Tokens] = field(default_factory=list)
    ends: list[pb.Tokens] = field(default_factory=list)
    num_deaf: int = 0  # ends that will get lost

    @asynccontextmanager
    async def running(self) -> AsyncIterator["GatewaySide"]:
        async with (
            self.bus.listen(subjects.TOKENS, self._on_tokens, gateway=self.id),
            self.bus.answer(subjects.TOKENS_END, self._on_end, gateway=self.id),
        ):
            yield self

    async def _on_tokens(self, batch: pb.TokenBatch) -> None:
        self.tokens += batch.messages

    async def _on_end(self, message: pb.Tokens) -> pb.TokensReply:
        if self.num_deaf:
            self.num_deaf -= 1
            raise RuntimeError("the gateway stumbles")
        self.ends.append(message)
        return pb.TokensReply(next_index=message.index + len(token_ids(message.token_ids)))


@dataclass
class Stage:
    """One prefill worker and its surroundings."""

    bus: Bus
    prefill: Prefill
    ref: pb.WorkerRef
    decode: DecodeSide
    gateway: GatewaySide
    beats: list[pb.Heartbeat] = field(default_factory=list)
    events: list[pb.BlockEvents] = field(default_factory=list)

    def request(self, ids: Sequence[int], request_id: str = "r", **changes: object) -> pb.Submit:
        """A submit that is right, but for the changes; sampling fields may be among them."""
        sampling = {"max_new_tokens": 8, "top_p": 1.0}
        names = pb.SamplingParams.DESCRIPTOR.fields_by_name
        sampling |= {name: changes.pop(name) for name in list(changes) if name in names}
        fixed = {
            "request_id": request_id,
            "model": MODEL,
            "token_ids": token_bytes(ids),
            "block_hashes": block_hash.pack(block_hash.block_hashes(ROOT, ids)),
            "hash_root": ROOT,
            "sampling": pb.SamplingParams(**sampling),  # type: ignore[arg-type]
            "prefill": self.ref,
            "decode": self.decode.ref,
            "gateway_id": self.gateway.id,
            "deadline_unix_ms": int(time.time() * 1000) + 60_000,
        }
        return pb.Submit(**{**fixed, **changes})  # type: ignore[arg-type]

    async def submit(self, submit: pb.Submit) -> pb.SubmitReply:
        return await self.bus.request(
            subjects.SUBMIT, submit, timeout_s=5, worker=self.ref.worker_id
        )

    async def accepted(self, submit: pb.Submit) -> None:
        reply = await self.submit(submit)
        assert reply.HasField("accepted"), reply.failure.message

    async def refused(self, submit: pb.Submit) -> pb.FailureKind:
        reply = await self.submit(submit)
        assert reply.HasField("failure")
        return reply.failure.kind

    async def cancel(self, request_id: str = "r") -> None:
        message = pb.Cancel(request_id=request_id)
        await self.bus.publish(subjects.CANCEL, message, worker=self.ref.worker_id)

    async def end(self) -> pb.End:
        """The one end the gateway hears of."""
        await until(lambda: self.gateway.ends)
        assert len(self.gateway.ends) == 1
        return self.gateway.ends[0].end

    def is_at_base(self) -> bool:
        """Nothing is held."""
        load = self.prefill.worker.load()
        return load.free_blocks == load.total_blocks and not load.waiting_tokens

    async def on_beat(self, message: pb.Heartbeat) -> None:
        if message.worker == self.ref:
            self.beats.append(message)

    async def on_events(self, message: pb.BlockEvents) -> None:
        if message.worker == self.ref:
            self.events.append(message)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async with (
            self.bus.listen(subjects.HEARTBEAT, self.on_beat),
            self.bus.listen(subjects.BLOCK_EVENTS, self.on_events),
        ):
            yield


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Return when it holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # of many kinds
            await asyncio.sleep(0.005)


def settings(nats_url: str, worker_id: str, **changes: object) -> PrefillConfig:
    fixed = {
        "nats_url": nats_url,
        "checkpoint": CHECKPOINT,
        "model": MODEL,
        "worker_id": worker_id,
        "kv_format": "fp32",
        "num_blocks": 32,
        "chunk_tokens": 128,
        "drain_s": 0.0,
    }
    return PrefillConfig(**{**fixed, **changes})  # type: ignore[arg-type]


def _sides(link: Bus, worker_id: str) -> tuple[DecodeSide, GatewaySide]:
    decode = pb.WorkerRef(worker_id=f"d-{worker_id}", epoch=5)
    return DecodeSide(link, decode), GatewaySide(link, f"g-{worker_id}")


@asynccontextmanager
async def stage(
    nats_url: str, worker_id: str, engine: FakeEngine, **changes: object
) -> AsyncIterator[Stage]:
    """A worker around the given engine, with both other sides present."""
    config = settings(nats_url, worker_id, **changes)
    async with bus.connect(nats_url, "test") as link, AsyncExitStack() as stack:
        decode, gateway = _sides(link, worker_id)
        await stack.enter_async_context(decode.running())
        await stack.enter_async_context(gateway.running())
        ref = pb.WorkerRef(worker_id=worker_id, epoch=time.time_ns())
        heartbeats = Heartbeats(link, ref, MODEL)
        prefill = await stack.enter_async_context(app.working(config, link, engine, heartbeats))
        made = Stage(link, prefill, ref, decode, gateway)
        await stack.enter_async_context(made.listening())
        await stack.enter_async_context(tasks.background(heartbeats.beat()))
        await until(lambda: made.beats)
        yield made
