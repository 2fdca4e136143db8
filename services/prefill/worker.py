"""The step loop: admit, choose chunks, run them on all ranks, tell what is done.

A prompt whose next block another one is computing waits for it: requests that come together with
one prefix compute it once.

Owns blocks, queue and journal; all of it on the event loop, which the ranks' computing never
blocks. Knows nothing of gateways and decode workers.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.prefill.scheduler import PlannedChunk, PrefillScheduler
from services.prefill.throughput import Throughput
from services.prefill.work import Work
from shared import farspan_pb2 as pb
from shared import subjects, telemetry
from shared.block_hash import BLOCK_TOKENS, BlockHash
from shared.block_journal import BlockJournal
from shared.bus import Bus
from shared.engine.kv.allocator import Allocation, BlockAllocator, num_usable_blocks
from shared.engine.kv.cache_events import Cleared, Removed, Stored
from shared.engine.step import BlockCopy, Chunk, PrefillStep, StepResult


class Runner(Protocol):
    """The ranks, as far as the loop needs them."""

    async def run(self, step: PrefillStep) -> StepResult:
        """The step's result, once every rank has done it."""
        ...


@dataclass(frozen=True)
class _Part:
    """A chunk, and whose. Ids may be used again while a step runs; the object may not."""

    work: Work
    allocation: Allocation
    planned: PlannedChunk


class Worker:
    """One engine's requests, from the queue to the release of their blocks."""

    def __init__(
        self,
        runner: Runner,
        allocator: BlockAllocator,
        journal: BlockJournal,
        bus: Bus,
        chunk_tokens: int,
    ) -> None:
        self._runner = runner
        self._allocator = allocator
        self._journal = journal
        self._bus = bus
        self._scheduler = PrefillScheduler(
            num_blocks=allocator.num_blocks,
            block_tokens=allocator.block_tokens,
            chunk_tokens=chunk_tokens,
        )
        self._throughput = Throughput()
        self._works: dict[str, Work] = {}
        self._computing: dict[BlockHash, Work] = {}  # who will publish a block first
        self._handed_out: list[tuple[int, int]] = []  # (block id, generation) since the last step
        self._wake = asyncio.Event()

    def enqueue(self, work: Work) -> None:
        """Let it wait for its blocks. TooLong if they could never be there; BadRequest if known."""
        self._scheduler.enqueue(work.request_id, work.num_tokens)
        self._works[work.request_id] = work
        self._wake.set()

    def release(self, work: Work) -> None:
        """Give its blocks back, in any state; releasing twice is harmless.

        A step that still writes to them is over before the next owner's first step begins.
        """
        if self._works.get(work.request_id) is not work:
            return
        del self._works[work.request_id]
        self._stop_computing(work, work.hashes)
        self._scheduler.release(work.request_id)
        if work.allocation is not None:
            self._allocator.free(work.allocation)
        self._wake.set()

    def load(self) -> pb.Load:
        """What the heartbeat says."""
        return pb.Load(
            num_running=self._scheduler.num_active,
            num_waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.active_tokens + self._waiting_tokens(),
            free_blocks=self._allocator.num_free,
            total_blocks=self._allocator.num_blocks,
            tokens_per_s=self._throughput.tokens_per_s,
            eviction_age_s=self._allocator.eviction_age_s,
            empty_blocks=self._allocator.num_empty,
            step_s=self._throughput.step_s,
            measured_age_s=self._throughput.age_s,
        )

    async def run(self) -> None:
        """For ever; raises what the ranks raise."""
        while True:
            self._wake.clear()
            self._scheduler.admit(self._allocate, self._leader)
            await self._publish_events()
            parts = self._plan()
            if parts:
                await self._step(parts)
            else:
                await self._wake.wait()

    def _allocate(self, request_id: str) -> int | None:
        work = self._works[request_id]
        allocation = self._allocator.allocate(work.num_tokens, work.hashes, may_hit=work.may_hit)
        if allocation is None:
            return None
        for block_hash in work.hashes[allocation.hit_tokens // BLOCK_TOKENS :]:
            self._computing.setdefault(block_hash, work)
        new_generations = allocation.generations[allocation.num_shared_blocks :]
        self._handed_out += zip(allocation.new_block_ids, new_generations, strict=True)
        work.progress.note(allocation.num_shared_blocks * self._allocator.block_tokens)
        work.admit(allocation)
        return allocation.hit_tokens

    def _leader(self, request_id: str) -> str | None:
        """Who is computing the first block of this prompt that is not there yet."""
        work = self._works[request_id]
        if work.awaited not in self._computing:  # asked at every step: mostly it is
            place = _first(work, lambda each: not self._allocator.can_find(each))
            work.awaited = work.hashes[place] if place < _num_usable(work) else None
        leader = None if work.awaited is None else self._computing.get(work.awaited)
        return None if leader is None else leader.request_id

    def _waiting_tokens(self) -> int:
        """To compute for prompts without blocks: each block once, and none that is there or being
        computed.
        """

        def is_left(block_hash: BlockHash) -> bool:
            return block_hash not in self._computing and not self._allocator.can_find(block_hash)

        num_tokens = 0
        firsts: dict[BlockHash, Work] = {}  # whose first block that is left, and nobody else's yet
        waiting = [work for work in self._works.values() if work.allocation is None]
        # Longest first: what begins a longer one is found in it at once, not turn by turn.
        for work in sorted(waiting, key=lambda each: -each.num_tokens):
            place = _first(work, is_left)
            while place < _num_usable(work):
                first = firsts.setdefault(work.hashes[place], work)
                if first is work:
                    break
                place = _num_common(work, first)
            num_tokens += work.num_tokens - place * BLOCK_TOKENS
        return num_tokens

    def _stop_computing(self, work: Work, block_hashes: Iterable[BlockHash]) -> None:
        for block_hash in block_hashes:
            if self._computing.get(block_hash) is work:
                del self._computing[block_hash]

    def _plan(self) -> list[_Part]:
        parts = []
        for planned in self._scheduler.next_step():
            work = self._works[planned.request_id]
            assert work.allocation is not None, "only admitted prompts are planned"
            parts.append(_Part(work, work.allocation, planned))
        return parts

    async def _step(self, parts: Sequence[_Part]) -> None:
        handed_out, self._handed_out = self._handed_out, []
        step = PrefillStep(
            chunks=tuple(map(self._chunk, parts)),
            generations=tuple(handed_out),
            copies=tuple(copy for part in parts for copy in _copies(part)),
        )
        spans = [_span(part) for part in parts]
        stages = [part.work.stages.begin("prefill.chunk") for part in parts]
        begun_s = time.monotonic()
        try:
            result = await self._runner.run(step)
        finally:
            for span in spans:
                span.end()
        num_tokens = sum(part.planned.end - part.planned.first for part in parts)
        self._throughput.add(num_tokens, time.monotonic() - begun_s)
        for part, stage in zip(parts, stages, strict=True):
            stage.end(part.planned.end - part.planned.first)
        self._finish(parts, result)
        await asyncio.sleep(0)  # first tokens leave before anything else

    def _chunk(self, part: _Part) -> Chunk:
        planned, work = part.planned, part.work
        # The MTP row of a token needs the hidden state of the token before it (see step.Chunk).
        num_recomputed = 1 if planned.first else 0
        first = planned.first - num_recomputed
        return Chunk(
            request_id=work.request_id,
            token_ids=work.token_ids[first : planned.end],
            first=first,
            num_recomputed=num_recomputed,
            block_ids=tuple(part.allocation.block_ids[: self._allocator.blocks_for(planned.end)]),
            sampling=work.sampling if planned.end == work.num_tokens else None,
            num_prompt_logprobs=work.num_prompt_logprobs,
        )

    def _finish(self, parts: Sequence[_Part], result: StepResult) -> None:
        live = [part for part in parts if self._works.get(part.work.request_id) is part.work]
        for part in live:
            if told := result.prompt_logprobs.get(part.work.request_id):
                part.work.prompt_logprobs.append(told)
            self._allocator.publish(part.allocation, part.planned.end)
            first, end = part.planned.first // BLOCK_TOKENS, part.planned.end // BLOCK_TOKENS
            self._stop_computing(part.work, part.work.hashes[first:end])
        complete = self._scheduler.computed([part.planned for part in live])
        for request_id in complete:
            self._works[request_id].finish(result.sampled[request_id])
        for part in live:
            part.work.progress.note(part.planned.end)

    async def _publish_events(self) -> None:
        for event in self._allocator.drain_events():
            match event:
                case Stored(hashes):
                    self._journal.stored(pb.TIER_DEVICE, hashes)
                case Removed(hashes):
                    self._journal.removed(pb.TIER_DEVICE, hashes)
                case Cleared():
                    self._journal.cleared()
        batch = self._journal.commit()
        if batch is not None:
            await self._bus.publish(subjects.BLOCK_EVENTS, batch)


def _num_usable(work: Work) -> int:
    return 0 if not work.may_hit else num_usable_blocks(work.num_tokens, work.hashes)


def _first(work: Work, is_so: Callable[[BlockHash], bool]) -> int:
    """The first usable block of which this is so; what is there is there from the beginning on."""
    return bisect_left(range(_num_usable(work)), True, key=lambda at: is_so(work.hashes[at]))


def _num_common(work: Work, other: Work) -> int:
    """How many leading blocks of a prompt are the other one's too: a hash covers all before it."""
    shorter = range(min(_num_usable(work), len(other.hashes)))
    return bisect_left(shorter, True, key=lambda at: work.hashes[at] != other.hashes[at])


def _copies(part: _Part) -> list[BlockCopy]:
    """Due before the prompt's first chunk, and only then: later the source may be another's."""
    is_first = part.planned.first == part.allocation.hit_tokens
    return part.allocation.copies if is_first else []


def _span(part: _Part) -> telemetry.Span:
    with telemetry.attached(part.work.trace):
        return telemetry.start(
            "prefill.chunk",
            request_id=part.work.request_id,
            first=part.planned.first,
            num_tokens=part.planned.end - part.planned.first,
            num_hit_tokens=part.allocation.hit_tokens,
        )
