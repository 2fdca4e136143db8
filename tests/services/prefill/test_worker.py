"""The step loop gives every rank what it needs, and no block two owners."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import pytest
import pytest_asyncio

from services.prefill.work import Work
from services.prefill.worker import Worker
from shared import block_hash, bus, subjects
from shared import farspan_pb2 as pb
from shared.block_journal import BlockJournal
from shared.engine.kv.allocator import BlockAllocator
from shared.engine.step import PrefillStep, Sampling
from tests.services.prefill.stage import ROOT, FakeEngine, until

_epochs = itertools.count(1)


class Loop:
    """A worker whose steps are seen, and made one by one."""

    def __init__(self, link: bus.Bus, ranks: int, num_blocks: int) -> None:
        self.engine = FakeEngine()
        self.ref = pb.WorkerRef(worker_id="w", epoch=next(_epochs))
        self.allocator = BlockAllocator(num_blocks, ranks=ranks)
        self.worker = Worker(
            self.engine, self.allocator, BlockJournal(self.ref), link, chunk_tokens=128
        )
        self.events: list[pb.BlockEvent] = []

    def work(self, request_id: str, ids: list[int], num_prompt_logprobs: int | None = None) -> Work:
        made = Work(
            request_id=request_id,
            token_ids=np.array(ids, np.uint32),
            hashes=block_hash.block_hashes(ROOT, ids),
            sampling=Sampling(),
            trace={},
            num_prompt_logprobs=num_prompt_logprobs,
        )
        self.worker.enqueue(made)
        return made

    async def on_events(self, batch: pb.BlockEvents) -> None:
        if batch.worker == self.ref:
            self.events += batch.events

    @property
    def steps(self) -> list[PrefillStep]:
        return self.engine.steps


async def _loop(nats_url: str, ranks: int, num_blocks: int = 16) -> AsyncIterator[Loop]:
    async with bus.connect(nats_url, "test") as link:
        made = Loop(link, ranks, num_blocks)
        async with link.listen(subjects.BLOCK_EVENTS, made.on_events):
            running = asyncio.create_task(made.worker.run())
            yield made
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            made.allocator.check_integrity()


@pytest_asyncio.fixture
async def loop(nats_url: str) -> AsyncIterator[Loop]:
    async for made in _loop(nats_url, ranks=1):
        yield made


@pytest_asyncio.fixture
async def loop_of_two(nats_url: str) -> AsyncIterator[Loop]:
    async for made in _loop(nats_url, ranks=2):
        yield made


async def test_later_chunks_begin_one_token_early(loop: Loop) -> None:
    """The MTP row of a token needs the hidden state of the one before it."""
    work = loop.work("a", list(range(300)))

    await work.sampled

    chunks = [step.chunks[0] for step in loop.steps]
    assert [(c.first, c.num_recomputed, c.end) for c in chunks] == [
        (0, 0, 128),
        (127, 1, 256),
        (255, 1, 300),
    ]
    assert [int(c.token_ids[0]) for c in chunks] == [0, 127, 255]
    assert [len(c.block_ids) for c in chunks] == [2, 4, 5]
    assert [c.sampling is not None for c in chunks] == [False, False, True]


async def test_generations_are_told_once_and_before_the_first_write(loop: Loop) -> None:
    work = loop.work("a", list(range(300)))
    await work.sampled

    allocation = await work.admitted
    expected = tuple(zip(allocation.block_ids, allocation.generations, strict=True))
    assert [step.generations for step in loop.steps] == [expected, (), ()]


async def test_a_prefix_is_computed_once(loop: Loop) -> None:
    """And its blocks are announced as soon as they are there."""
    first = loop.work("a", list(range(300)))
    await first.sampled
    loop.worker.release(first)

    second = loop.work("b", [*range(256), 999])
    await second.sampled

    assert (await second.admitted).hit_tokens == 256
    last = loop.steps[-1].chunks[0]
    assert (last.first, last.num_recomputed, last.end) == (255, 1, 257)
    await until(lambda: len(loop.events) >= 2)
    stored = b"".join(event.stored.block_hashes for event in loop.events)
    assert stored == block_hash.pack(block_hash.block_hashes(ROOT, list(range(256))))


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_burst_with_one_prefix_computes_it_once(nats_url: str, num_ranks: int) -> None:
    """Requests that came together each computed it once more behind its first chunk (C8)."""
    async for loop in _loop(nats_url, ranks=num_ranks, num_blocks=32):
        works = [
            loop.work(name, [*range(256), *range(1000 * number, 1000 * number + 50)])
            for number, name in enumerate("abcd", start=1)
        ]
        stranger = loop.work("e", list(range(9000, 9070)))
        await asyncio.gather(*(work.sampled for work in [*works, stranger]))

        assert [(await work.admitted).hit_tokens for work in works] == [0, 256, 256, 256]
        chunks = [chunk for step in loop.steps for chunk in step.chunks]
        computed = sum(len(chunk.token_ids) - chunk.num_recomputed for chunk in chunks)
        assert computed == 256 + 4 * 50 + 70
        assert (await stranger.admitted).hit_tokens == 0


async def test_what_others_compute_for_a_prompt_does_not_wait_for_computation(
    loop: Loop,
) -> None:
    """Counted for each, a burst's prefix made the worker look fifteen times as busy as it was."""
    loop.engine.hold()
    prompts = [[*range(200), *range(1000 * n, 1000 * n + 56)] for n in range(1, 9)]
    for number, prompt in enumerate(prompts[:3]):
        loop.work(str(number), prompt)
    await until(lambda: loop.engine.is_running)
    for number, prompt in enumerate(prompts[3:], start=3):  # while the first one's step runs
        loop.work(str(number), prompt)

    # 192 common tokens are three blocks; 64 of each prompt are its own. Eight times four blocks are
    # more than the pool has room for.
    assert loop.worker.load().waiting_tokens == 256 + 7 * 64
    loop.engine.may_run.set()


async def test_what_several_waiting_prompts_want_is_counted_once(loop: Loop) -> None:
    """Turns of a conversation begin with what somebody computes, and share what nobody does."""
    loop.engine.hold()
    loop.work("system", list(range(130)))
    await until(lambda: loop.engine.is_running)
    for number in range(1, 4):
        loop.work(str(number), [*range(320), *range(1000 * number, 1000 * number + 10)])

    # Of 330 tokens 128 are being computed and 192 more are common: the first of the three has both.
    assert loop.worker.load().waiting_tokens == 130 + (330 - 128) + 2 * (330 - 320)
    loop.engine.may_run.set()


async def test_who_shares_only_the_beginning_hides_nothing_that_others_share(loop: Loop) -> None:
    """A short prompt before a burst made each of the burst count whole."""
    loop.engine.hold()
    loop.work("stranger", list(range(9000, 9100)))
    await until(lambda: loop.engine.is_running)
    loop.work("short", [*range(64), *range(5000, 5010)])
    loop.work("middle", [*range(192), *range(6000, 6010)])
    for number in range(1, 4):
        loop.work(str(number), [*range(320), *range(1000 * number, 1000 * number + 10)])

    assert loop.worker.load().waiting_tokens == 100 + 330 + 2 * 10 + 10 + 10
    loop.engine.may_run.set()


async def test_when_the_first_of_a_burst_leaves_the_next_one_computes(loop: Loop) -> None:
    """Behind the blocks that are there; nobody waits for somebody who is gone."""
    loop.engine.hold()
    loop.engine.is_stepwise = True
    first = loop.work("a", [*range(400), 1])
    second, third = (
        loop.work(name, [*range(400), number]) for number, name in ((2, "b"), (3, "c"))
    )
    await until(lambda: loop.engine.is_running)
    loop.engine.may_run.set()
    await until(lambda: len(loop.steps) == 2 and loop.engine.is_running)

    loop.worker.release(first)
    loop.engine.is_stepwise = False
    loop.engine.may_run.set()
    await asyncio.gather(second.sampled, third.sampled)

    # The step that ran for the first one is nobody's: only its first 128 tokens were published.
    assert [(await work.admitted).hit_tokens for work in (second, third)] == [128, 384]


async def test_a_hit_inside_an_effective_block_is_copied_once(loop_of_two: Loop) -> None:
    """Two ranks share blocks of 128 tokens; 64 of them may be another request's beginning."""
    first = loop_of_two.work("a", list(range(200)))
    await first.sampled
    second = loop_of_two.work("b", [*range(192), *range(500, 700)])
    await second.sampled

    allocation = await second.admitted
    assert allocation.hit_tokens == 192
    copies = [step.copies for step in loop_of_two.steps if step.chunks[0].request_id == "b"]
    assert copies[0] == tuple(allocation.copies) and len(copies[0]) == 1
    assert not any(copies[1:])


async def test_what_is_released_during_a_step_is_not_announced(loop: Loop) -> None:
    """Nobody vouches for the blocks of a request that is gone."""
    loop.engine.hold()
    work = loop.work("a", list(range(128)))
    await until(lambda: loop.engine.is_running)

    loop.worker.release(work)
    loop.engine.may_run.set()
    other = loop.work("b", list(range(500, 600)))
    await other.sampled

    loop.worker.release(other)
    hit = loop.work("c", [*range(128), 1])
    assert (await hit.admitted).hit_tokens == 0
    assert not work.sampled.done()


async def test_an_id_that_comes_again_during_a_step_is_another_request(loop: Loop) -> None:
    """The step computed the first one's rows: publishing the second one's would be wrong KV."""
    loop.engine.hold()
    before = loop.work("a", list(range(128)))
    await until(lambda: loop.engine.is_running)
    loop.worker.release(before)
    again = loop.work("a", list(range(500, 700)))

    loop.engine.may_run.set()
    await again.sampled

    firsts = [step.chunks[0].first for step in loop.steps]
    assert firsts == [0, 0, 127]


async def test_throughput_is_measured(loop: Loop) -> None:
    assert loop.worker.load().tokens_per_s == 0.0

    await loop.work("a", list(range(300))).sampled

    assert loop.worker.load().tokens_per_s > 0
    assert loop.worker.load().step_s > 0


async def test_a_prompt_whose_logprobs_are_wanted_waits_for_nobody(loop: Loop) -> None:
    """It computes what another one is computing too: blocks do not hold logprobs."""
    loop.engine.hold()
    first = loop.work("a", list(range(300)))
    await until(lambda: loop.engine.is_running)
    second = loop.work("b", list(range(300)), num_prompt_logprobs=1)
    loop.engine.may_run.set()

    await asyncio.gather(first.sampled, second.sampled)

    computed = [
        c.end - c.num_cached for step in loop.steps for c in step.chunks if c.request_id == "b"
    ]
    assert sum(computed) == 300
    assert sum(len(told.chosen) // 4 for told in second.prompt_logprobs) == 299
