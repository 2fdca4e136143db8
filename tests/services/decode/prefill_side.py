"""The other ends of a decode worker: a real prefill engine whose KV is exported over NIXL, and a
gateway that collects tokens.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shared import block_hash, subjects
from shared import farspan_pb2 as pb
from shared.block_hash import token_bytes, token_ids
from shared.bus import Bus
from shared.engine.attention_ops import CpuAttentionOps
from shared.engine.comm import RankGroup
from shared.engine.drawing import Drawing
from shared.engine.handoff.exporter import KvExporter
from shared.engine.handoff.layout_message import describe_layout
from shared.engine.kv.format import make_format
from shared.engine.kv.layout import Sharding
from shared.engine.kv.pool import BlockPool
from shared.engine.model.backend import CpuBackend
from shared.engine.model.config import load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.prefill_engine import PrefillEngine
from shared.engine.prefill_kv import KvContext
from shared.engine.step import Chunk, PrefillStep, Sampled, Sampling
from shared.grammar import Vocabulary

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "demo-fp8"
KV_FORMAT = "fp32"
VOCABULARY = Vocabulary(CHECKPOINT, 4096)
NUM_BLOCKS = 96
ROOT = block_hash.namespace("demo", "f1")
_epochs = itertools.count(time.time_ns())


class Source:
    """One rank of prefill; blocks are handed out one after another, anew for each prompt."""

    def __init__(self) -> None:
        config, group = load_config(CHECKPOINT), RankGroup()
        kv_format = make_format(KV_FORMAT, config.attention)
        model = Transformer(config, load_weights(CHECKPOINT, config, group, CpuBackend()), group)
        sharding = Sharding(1, 64)
        self.epoch = next(_epochs)
        self.pool = BlockPool(config, kv_format, NUM_BLOCKS, self.epoch)
        ops = CpuAttentionOps(kv_format, config.attention)
        context = KvContext(self.pool, ops, config.attention.kv_lora_rank, sharding, group)
        self.engine = PrefillEngine(model, context)
        self.layout = describe_layout(CHECKPOINT, config, kv_format, sharding)
        self.exporter = KvExporter(
            "prefill", self.pool.rows, self.pool.index_pages, self.pool.generations
        )
        self._next_block = 0
        self._generation = 0

    def blocks_for(self, num_tokens: int) -> list[pb.BlockRef]:
        """Blocks of a new generation for so many tokens."""
        count = -(-num_tokens // 64)
        ids = [(self._next_block + i) % NUM_BLOCKS for i in range(count)]
        self._next_block += count
        self._generation += 1
        self.pool.set_generations([(i, self._generation) for i in ids])
        return [pb.BlockRef(block_id=i, generation=self._generation) for i in ids]

    def compute(
        self, ids: list[int], blocks: list[pb.BlockRef], first: int, end: int, sampling: Sampling
    ) -> Sampled:
        """Cache tokens [first, end) and draw the next."""
        start = max(first - 1, 0)
        chunk = Chunk(
            request_id="r",
            token_ids=np.array(ids[start:end], np.uint32),
            first=start,
            num_recomputed=first - start,
            block_ids=tuple(ref.block_id for ref in blocks[: -(-end // 64)]),
            sampling=sampling,
        )
        return self.engine.run(PrefillStep((chunk,))).sampled["r"]

    def expected(self, ids: list[int], count: int, **asked: object) -> list[int]:
        """What one process would answer."""
        return [drawn.token_id for drawn in self.answer(ids, count, **asked)]

    def answer(self, ids: list[int], count: int, **asked: object) -> list[Sampled]:
        """The same with all that is told of a token: each in a chunk of its own."""
        sampling = pb.SamplingParams(**{"top_p": 1.0, **asked})  # type: ignore[arg-type]
        drawing = Drawing(sampling, np.array(ids, np.uint32), 0, VOCABULARY)
        ids, blocks = list(ids), self.blocks_for(len(ids) + count)
        first, answer = 0, list[Sampled]()
        while len(answer) < count and not drawing.is_over:
            answer.append(self.compute(ids, blocks, first, len(ids), drawing.next()))
            drawing.take(answer[-1].token_id)
            first = len(ids)
            ids.append(answer[-1].token_id)
        return answer


@dataclass
class Answered:
    """What a gateway got of one request."""

    tokens: dict[int, int] = field(default_factory=dict)  # index to token
    chosen: dict[int, float] = field(default_factory=dict)  # index to its logprob
    stages: list[pb.Stage] = field(default_factory=list)
    ends: list[pb.End] = field(default_factory=list)
    num_messages: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> list[int]:
        """The tokens in order; a hole is an error."""
        first = min(self.tokens, default=0)
        return [self.tokens[first + i] for i in range(len(self.tokens))]


@dataclass
class PrefillSide:
    """A prefill worker and a gateway on the bus. Prompts are computed when told to."""

    bus: Bus
    decode: pb.WorkerRef
    source: Source
    ref: pb.WorkerRef
    gateway_id: str = "gw-test"
    answers: dict[str, Answered] = field(default_factory=dict)
    aborts: list[pb.Abort] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    renewals: list[str] = field(default_factory=list)
    events: list[pb.BlockEvents] = field(default_factory=list)
    beats: list[pb.Heartbeat] = field(default_factory=list)
    batches: list[pb.TokenBatch] = field(default_factory=list)
    is_beating: bool = True
    lost_indices: set[int] = field(default_factory=set)  # tokens that get lost once

    @asynccontextmanager
    async def running(self) -> AsyncIterator["PrefillSide"]:
        worker, gateway = {"worker": self.ref.worker_id}, {"gateway": self.gateway_id}
        async with AsyncExitStack() as stack:
            for subscription in (
                self.bus.listen(subjects.ABORT, self._on_abort, **worker),
                self.bus.listen(subjects.RELEASE, self._on_release, **worker),
                self.bus.listen(subjects.LEASE_RENEWAL, self._on_renewal, **worker),
                self.bus.listen(subjects.BLOCK_EVENTS, self._on_events),
                self.bus.listen(subjects.HEARTBEAT, self._on_beat),
                self.bus.listen(subjects.TOKENS, self._on_tokens, **gateway),
                self.bus.answer(subjects.TOKENS_END, self._on_end, **gateway),
            ):
                await stack.enter_async_context(subscription)
            beating = asyncio.create_task(self._beat())
            try:
                yield self
            finally:
                beating.cancel()

    def offer(self, request_id: str, ids: list[int], **sampling: object) -> pb.HandoffOffer:
        """An offer of blocks that nothing is written to yet."""
        fixed = {"max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, **sampling}
        self.answers[request_id] = Answered()
        return pb.HandoffOffer(
            request_id=request_id,
            prefill=self.ref,
            decode=self.decode,
            token_ids=token_bytes(ids),
            block_hashes=block_hash.pack(block_hash.block_hashes(ROOT, ids)),
            hash_root=ROOT,
            sampling=pb.SamplingParams(**fixed),  # type: ignore[arg-type]
            gateway_id=self.gateway_id,
            deadline_unix_ms=int(time.time() * 1000) + 60_000,
            layout=self.source.layout,
            ranks=[self.source.exporter.regions()],
            blocks=self.source.blocks_for(len(ids)),
            lease_ms=30_000,
        )

    async def send(self, offer: pb.HandoffOffer) -> pb.HandoffReply:
        return await self.bus.request(
            subjects.OFFER, offer, timeout_s=5, worker=self.decode.worker_id
        )

    async def accepted(self, offer: pb.HandoffOffer) -> int:
        """The tokens decode says it holds."""
        reply = await self.send(offer)
        assert reply.HasField("accepted"), reply.failure.message
        return reply.accepted.held_tokens

    async def compute(self, offer: pb.HandoffOffer, chunk_tokens: int = 512) -> Sampled:
        """Prefill the prompt chunk by chunk, telling decode of each."""
        ids = token_ids(offer.token_ids)
        for first in range(0, len(ids), chunk_tokens):
            end = min(len(ids), first + chunk_tokens)
            sampled = await asyncio.to_thread(
                self.source.compute, ids, list(offer.blocks), first, end, _sampling(offer)
            )
            await self.chunk_ready(offer, end)
        return sampled

    async def chunk_ready(self, offer: pb.HandoffOffer, num_tokens: int) -> None:
        chunk = pb.ChunkReady(
            request_id=offer.request_id, prefill=self.ref, num_ready_tokens=num_tokens
        )
        await self.bus.publish(subjects.CHUNK_READY, chunk, worker=self.decode.worker_id)

    async def done(self, offer: pb.HandoffOffer, sampled: Sampled) -> None:
        """Hand the request over; the first token reaches the gateway from here."""
        first = offer.num_resumed_tokens
        self.answers[offer.request_id].tokens[first] = sampled.token_id
        message = pb.PrefillDone(
            request_id=offer.request_id,
            prefill=self.ref,
            first_token_id=sampled.token_id,
            last_hidden=sampled.last_hidden,
            num_cached_tokens=7,
            first_logprobs=sampled.logprobs,
        )
        await self.bus.request(
            subjects.PREFILL_DONE, message, timeout_s=5, worker=self.decode.worker_id
        )

    async def serve(self, offer: pb.HandoffOffer, chunk_tokens: int = 512) -> Answered:
        """The whole of a request, to its end."""
        await self.accepted(offer)
        await self.done(offer, await self.compute(offer, chunk_tokens))
        return await self.ended(offer)

    async def ended(self, offer: pb.HandoffOffer) -> Answered:
        answer = self.answers[offer.request_id]
        async with asyncio.timeout(30):
            await answer.ended.wait()
        return answer

    async def abort(self, offer: pb.HandoffOffer) -> None:
        failure = pb.Failure(kind=pb.FAILURE_KIND_WORKER_LOST, message="given up")
        abort = pb.Abort(request_id=offer.request_id, sender=self.ref, failure=failure)
        await self.bus.publish(subjects.ABORT, abort, worker=self.decode.worker_id)

    async def cancel(self, offer: pb.HandoffOffer) -> None:
        cancel = pb.Cancel(request_id=offer.request_id)
        await self.bus.publish(subjects.CANCEL, cancel, worker=self.decode.worker_id)

    async def _beat(self) -> None:
        while True:
            if self.is_beating:
                beat = pb.Heartbeat(
                    worker=self.ref, role=pb.ROLE_PREFILL, state=pb.SERVICE_STATE_READY
                )
                await self.bus.publish(subjects.HEARTBEAT, beat)
            await asyncio.sleep(0.3)

    async def _on_abort(self, message: pb.Abort) -> None:
        self.aborts.append(message)

    async def _on_release(self, message: pb.Release) -> None:
        self.releases.append(message.request_id)

    async def _on_renewal(self, message: pb.LeaseRenewal) -> None:
        self.renewals += message.request_ids

    async def _on_events(self, message: pb.BlockEvents) -> None:
        self.events.append(message)

    async def _on_beat(self, message: pb.Heartbeat) -> None:
        if message.role == pb.ROLE_DECODE:
            self.beats.append(message)

    async def _on_tokens(self, batch: pb.TokenBatch) -> None:
        self.batches.append(batch)
        for message in batch.messages:
            if message.index in self.lost_indices:
                self.lost_indices.remove(message.index)
            else:
                self._keep(message)

    async def _on_end(self, message: pb.Tokens) -> pb.TokensReply:
        answer = self._keep(message)
        first = min(answer.tokens, default=message.index)
        next_index = next(i for i in itertools.count(first) if i not in answer.tokens)
        is_failure = message.end.reason == pb.FINISH_REASON_FAILED
        if is_failure or next_index == message.index + len(message.token_ids) // 4:
            answer.ends.append(message.end)
            answer.ended.set()
        return pb.TokensReply(next_index=next_index)

    def _keep(self, message: pb.Tokens) -> Answered:
        assert message.sender == self.decode
        answer = self.answers[message.request_id]
        answer.num_messages += 1
        for place, token in enumerate(token_ids(message.token_ids)):
            assert answer.tokens.setdefault(message.index + place, token) == token
        chosen = np.frombuffer(message.logprobs.chosen, "<f4").tolist()
        answer.chosen.update(enumerate(chosen, message.index))
        answer.stages += message.stages
        return answer


def _sampling(offer: pb.HandoffOffer) -> Sampling:
    ids = np.frombuffer(offer.token_ids, "<u4")
    return Drawing(offer.sampling, ids, offer.num_resumed_tokens, VOCABULARY).next()
