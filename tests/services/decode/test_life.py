"""One request's life on a decode worker, with a real prefill engine on the other side."""

import asyncio
import random
import time

import numpy as np
import pytest

from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import block_hashes, unpack
from shared.errors import WorkerLost
from tests.services.decode.conftest import Stage, StartStage
from tests.services.decode.prefill_side import ROOT, PrefillSide

JSON = pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text='start: %json {"type": "object"}')


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(300, 4000), k=num_tokens)


async def until(is_so: object, timeout_s: float = 10.0) -> None:
    """Return when `is_so()` is true."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def stored_hashes(side: PrefillSide) -> list[bytes]:
    return [
        block
        for batch in side.events
        for event in batch.events
        for block in unpack(event.stored.block_hashes)
    ]


@pytest.mark.parametrize(
    ("residency", "device_pool_mib", "reads_host"),
    [
        pytest.param("all-resident", 32, False, id="all-resident"),
        pytest.param("mixed", 32, False, id="mixed-with-room"),
        pytest.param("mixed", 8, True, id="mixed-under-pressure"),
        pytest.param("all-host", 32, True, id="all-host"),
    ],
)
async def test_tokens_equal_those_of_one_process(
    stage: StartStage, residency: str, device_pool_mib: int, reads_host: bool
) -> None:
    """The demo's top-k is 256: with 700 tokens selection, hot rows and host reads are real."""
    async with stage(residency=residency, device_pool_mib=device_pool_mib) as running:
        side, ids = running.side, prompt(700)

        answer = await side.serve(side.offer("r", ids, max_new_tokens=12), chunk_tokens=256)

        assert answer.text == side.source.expected(ids, 12)
        assert answer.ends == [
            pb.End(
                reason=pb.FINISH_REASON_LENGTH,
                usage=pb.Usage(prompt_tokens=700, cached_tokens=7, generated_tokens=12),
            )
        ]
        await running.is_back_to_base()
        counters = running.service.rank.steps.counters
        assert (sum(counter.misses for counter in counters) > 0) == reads_host


async def test_several_requests_decode_together(stage: StartStage) -> None:
    """They join and leave at any step, and a row does not depend on its batch."""
    async with stage() as running:
        side = running.side
        prompts = [prompt(n, seed=n) for n in (1, 63, 64, 65, 300)]
        offers = [
            side.offer(f"r{n}", ids, max_new_tokens=6 + 3 * n) for n, ids in enumerate(prompts)
        ]

        answers = await asyncio.gather(*(side.serve(offer) for offer in offers))

        for n, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.text == side.source.expected(ids, 6 + 3 * n)
        await running.is_back_to_base()


async def test_only_missing_blocks_move_the_second_time(stage: StartStage) -> None:
    """The delta handoff: the prompt's blocks, and those the answer has filled, are found again."""
    async with stage() as running:
        side, ids = running.side, prompt(250)
        first = await side.serve(side.offer("r1", ids, max_new_tokens=80))
        moved = running.service.rank.importer.counts.num_bytes
        longer = ids + first.text + prompt(30, seed=1)
        offer = side.offer("r2", longer)

        held = await side.accepted(offer)
        await side.done(offer, await side.compute(offer))
        second = await side.ended(offer)

        # The last token of the first answer was sent but never cached.
        assert held == (250 + 80 - 1) // 64 * 64
        assert running.service.rank.importer.counts.num_bytes - moved < moved / 2
        assert second.text == side.source.expected(longer, 8)
        await running.is_back_to_base()


async def test_full_blocks_are_announced(stage: StartStage) -> None:
    """Prompt and answer form one chain, from the root that the offer carries."""
    async with stage() as running:
        side, ids = running.side, prompt(50)

        answer = await side.serve(side.offer("r", ids, max_new_tokens=90))

        expected = block_hashes(ROOT, (ids + answer.text)[:-1])
        assert len(expected) == 2
        await until(lambda: stored_hashes(side) == expected)
        assert [batch.sequence for batch in side.events] == [1, 2]


async def test_sampled_tokens_continue_where_prefill_was(stage: StartStage) -> None:
    """Token i is drawn from the generator keyed by (seed, i), wherever that happens."""
    async with stage() as running:
        side, ids = running.side, prompt(100)
        expected = side.source.expected(ids, 8, temperature=1.0, seed=11)

        whole = await side.serve(side.offer("r1", ids, temperature=1.0, seed=11))
        offer = side.offer("r2", ids + expected[:3], temperature=1.0, seed=11, max_new_tokens=5)
        offer.num_resumed_tokens = 3
        resumed = await side.serve(offer)

        assert whole.text == expected
        assert resumed.tokens == {3 + i: token for i, token in enumerate(expected[3:])}
        usage = resumed.ends[0].usage
        assert (usage.prompt_tokens, usage.generated_tokens) == (100, 8)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"frequency_penalty": 1.5, "presence_penalty": 0.5}, id="penalties"),
        pytest.param(
            {"repetition_penalty": 1.8, "min_p": 0.1, "temperature": 1.0}, id="repetition"
        ),
        pytest.param({"bias_token_ids": [500, 501], "biases": [4.0, 4.5]}, id="bias"),
        pytest.param({"grammar": JSON, "temperature": 1.0, "seed": 4}, id="grammar"),
    ],
)
async def test_whatever_is_asked_is_drawn_as_in_one_process_resumed_or_not(
    stage: StartStage, asked: dict[str, object]
) -> None:
    """Neither a handoff nor a second attempt forgets what was written."""
    async with stage() as running:
        side, ids = running.side, prompt(100)
        expected = side.source.expected(ids, 10, **asked)

        whole = await side.serve(side.offer("r1", ids, max_new_tokens=10, **asked))
        left = len(expected) - 3
        offer = side.offer("r2", ids + expected[:3], max_new_tokens=left, **asked)
        offer.num_resumed_tokens = 3
        resumed = await side.serve(offer)

        assert whole.text == expected
        assert resumed.text == expected[3:]


async def test_a_grammar_that_cannot_be_used_fails_before_the_handover(stage: StartStage) -> None:
    """Prefill is told, so that it ends the request; no pool holds anything."""
    async with stage() as running:
        side = running.side
        bad = pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text="start: missing")

        await side.accepted(side.offer("r", prompt(70), grammar=bad))

        await until(lambda: side.aborts)
        assert side.aborts[0].failure.kind == pb.FAILURE_KIND_BAD_REQUEST
        await running.is_back_to_base()


async def test_logprobs_come_with_their_tokens_and_again_with_lost_ones(stage: StartStage) -> None:
    """The first token's too, which prefill has told: its message may be the lost one."""
    async with stage() as running:
        side, ids = running.side, prompt(70)
        told = [drawn.logprobs for drawn in side.source.answer(ids, 8, num_logprobs=3)]
        side.lost_indices = {2, 5}
        offer = side.offer("r", ids, num_logprobs=3)

        await side.accepted(offer)
        await side.done(offer, await side.compute(offer))
        resend = pb.ResendTokens(request_id="r", from_index=0)
        await side.bus.publish(subjects.RESEND_TOKENS, resend, worker=side.decode.worker_id)
        answer = await side.ended(offer)

        expected = [np.frombuffer(each.chosen, "<f4")[0] for each in told if each is not None]
        await until(lambda: len(answer.chosen) == 8)
        assert [answer.chosen[place] for place in range(8)] == expected


async def test_tokens_of_a_step_are_one_message(stage: StartStage) -> None:
    """However many answers they belong to; none waits for another step."""
    async with stage() as running:
        side = running.side
        offers = [side.offer(f"r{n}", prompt(70, seed=n), max_new_tokens=40) for n in range(3)]

        await asyncio.gather(*(side.serve(offer) for offer in offers))

        sizes = [len(batch.messages) for batch in side.batches]
        assert max(sizes) == 3
        for batch in side.batches:
            assert all(len(message.token_ids) == 4 for message in batch.messages)


async def test_the_end_tells_what_decode_did_and_when(stage: StartStage) -> None:
    async with stage() as running:
        side = running.side

        answer = await side.serve(side.offer("r", prompt(700)), chunk_tokens=256)

        names = [told.name for told in answer.stages]
        assert names[0] == "decode.queue" and names[-1] == "decode.generate"
        assert set(names[1:-1]) == {"handoff.pull"}
        assert sum(told.num_tokens for told in answer.stages[1:-1]) == 700
        assert answer.stages[-1].num_tokens == 8
        times = [time for told in answer.stages for time in (told.begin_unix_us, told.end_unix_us)]
        assert times == sorted(times)


async def test_a_stop_token_ends_the_answer_and_is_sent(stage: StartStage) -> None:
    async with stage() as running:
        side, ids = running.side, prompt(70)
        expected = side.source.expected(ids, 6)

        answer = await side.serve(side.offer("r", ids, stop_token_ids=[expected[4]]))

        assert answer.text == expected[: expected.index(expected[4]) + 1]
        assert answer.ends[0].reason == pb.FINISH_REASON_STOP


async def test_stop_tokens_cannot_come_before_the_shortest_answer(stage: StartStage) -> None:
    async with stage() as running:
        side, ids = running.side, prompt(70)
        stop = side.source.expected(ids, 3)[2]

        offer = side.offer("r", ids, stop_token_ids=[stop], min_new_tokens=6, max_new_tokens=6)
        answer = await side.serve(offer)

        assert len(answer.text) == 6
        assert stop not in answer.text


async def test_lost_tokens_are_sent_again(stage: StartStage) -> None:
    """Messages are delivered at most once; the end is repeated until nothing is missing."""
    async with stage() as running:
        side, ids = running.side, prompt(70)
        side.lost_indices = {2, 5}

        answer = await side.serve(side.offer("r", ids))

        assert answer.text == side.source.expected(ids, 8)
        assert len(answer.ends) == 1


async def test_a_dead_reference_ends_in_a_retry_never_in_tokens(stage: StartStage) -> None:
    """Prefill gave a block to another request before it was read."""
    async with stage() as running:
        side = running.side
        offer = side.offer("r", prompt(300))
        await side.accepted(offer)
        offer_block = offer.blocks[2]
        side.source.pool.set_generations([(offer_block.block_id, offer_block.generation + 1)])

        await side.chunk_ready(offer, 300)
        answer = await side.ended(offer)

        assert not answer.tokens
        assert answer.ends[0].reason == pb.FINISH_REASON_FAILED
        assert answer.ends[0].failure.kind == pb.FAILURE_KIND_WORKER_LOST
        await until(lambda: side.aborts)
        assert side.aborts[0].request_id == "r"
        await running.is_back_to_base()


async def test_numbers_that_are_not_finite_end_one_request_never_in_text(stage: StartStage) -> None:
    """The engine refuses the step; the sequence beside it goes on."""
    async with stage() as running:
        side, ids = running.side, prompt(90)
        good, bad = side.offer("good", ids, max_new_tokens=60), side.offer("bad", prompt(80))
        for offer in (good, bad):
            await side.accepted(offer)
        sampled = await side.compute(good)
        side.source.pool.rows[bad.blocks[0].block_id] = 255  # fp32 bytes that are no numbers
        await side.chunk_ready(bad, 64)
        await side.done(good, sampled)

        await side.done(bad, sampled)
        answer = await side.ended(bad)

        assert answer.ends[0].failure.kind == pb.FAILURE_KIND_INTERNAL
        assert answer.text == [sampled.token_id]  # prefill's
        assert (await side.ended(good)).text == side.source.expected(ids, 60)
        await running.is_back_to_base()


async def test_a_prefill_worker_that_falls_silent_is_lost(stage: StartStage) -> None:
    """It sent the first token and died: nobody else would end the request."""
    async with stage() as running:
        side = running.side
        offer = side.offer("r", prompt(300))
        await side.accepted(offer)

        side.is_beating = False
        answer = await side.ended(offer)

        assert answer.ends[0].failure.kind == pb.FAILURE_KIND_WORKER_LOST
        await running.is_back_to_base()


async def test_a_deadline_ends_a_decoding_request(stage: StartStage) -> None:
    async with stage() as running:
        side = running.side
        offer = side.offer("r", prompt(70), max_new_tokens=2000)
        offer.deadline_unix_ms = int(time.time() * 1000) + 1500

        answer = await side.serve(offer)

        assert answer.ends[0].failure.kind == pb.FAILURE_KIND_DEADLINE
        assert len(answer.text) > 1
        await running.is_back_to_base()


STAGES = ["waiting", "admitted", "pulling", "decoding"]


@pytest.mark.parametrize("state", STAGES)
@pytest.mark.parametrize("is_abort", [False, True], ids=["cancel", "abort"])
async def test_pools_return_to_base_whatever_the_state(
    stage: StartStage, state: str, is_abort: bool
) -> None:
    """Cancelled by the gateway or given up by prefill: nothing stays behind."""
    async with stage(max_concurrent=1) as running:
        side = running.side
        offer = await brought_to(running, state)

        await (side.abort(offer) if is_abort else side.cancel(offer))

        if state == "waiting":
            await until(lambda: running.service.rank.scheduler.num_waiting == 0)
            await side.cancel(running_offer(side))
        if state == "decoding" and is_abort:  # prefill has no say any more
            await side.cancel(offer)
        if state == "decoding":
            answer = await side.ended(offer)
            assert answer.ends[0].failure.kind == pb.FAILURE_KIND_CANCELLED
        await running.is_back_to_base()
        assert len(side.answers["r"].ends) == (state == "decoding")


async def brought_to(running: Stage, state: str) -> pb.HandoffOffer:
    side, rank = running.side, running.service.rank
    if state == "waiting":
        await side.accepted(side.offer("before", prompt(100)))
    offer = side.offer("r", prompt(400), max_new_tokens=1000)
    await side.accepted(offer)
    if state == "waiting":
        assert rank.scheduler.num_waiting == 1
    if state in ("pulling", "decoding"):
        sampled = await side.compute(offer, chunk_tokens=100)
    if state == "decoding":
        await side.done(offer, sampled)
        await until(lambda: len(side.answers["r"].tokens) > 3)
    return offer


def running_offer(side: PrefillSide) -> pb.HandoffOffer:
    return pb.HandoffOffer(request_id="before")


async def test_a_waiting_request_starts_when_another_ends(stage: StartStage) -> None:
    """Its lease is kept alive from the moment of queueing."""
    async with stage(max_concurrent=1) as running:
        side = running.side
        first, second = side.offer("r1", prompt(70)), side.offer("r2", prompt(90, seed=1))
        first.lease_ms = second.lease_ms = 1200
        await side.accepted(first)
        await side.accepted(second)
        sampled = await side.compute(second)
        await side.done(second, sampled)
        await until(lambda: side.renewals.count("r2") >= 2)

        await side.done(first, await side.compute(first))
        answers = [await side.ended(first), await side.ended(second)]

        assert answers[1].text == side.source.expected(prompt(90, seed=1), 8)
        assert side.releases == ["r1", "r2"]


async def test_a_drain_ends_what_is_left_so_that_it_is_retried(stage: StartStage) -> None:
    async with stage(drain_s=0.3) as running:
        side = running.side
        decoding = side.offer("r1", prompt(70), max_new_tokens=2000)
        await side.accepted(decoding)
        await side.done(decoding, await side.compute(decoding))
        importing = side.offer("r2", prompt(70, seed=1))
        await side.accepted(importing)

        draining = asyncio.create_task(running.service.drain(0.3))
        await until(lambda: pb.SERVICE_STATE_DRAINING in {beat.state for beat in side.beats})
        refused = await side.send(side.offer("r3", prompt(10)))
        await draining

        assert refused.failure.kind == pb.FAILURE_KIND_WORKER_LOST
        answer = await side.ended(decoding)
        assert answer.ends[0].failure.kind == pb.FAILURE_KIND_WORKER_LOST
        await until(lambda: side.beats[-1].state == pb.SERVICE_STATE_STOPPED)
        assert [abort.request_id for abort in side.aborts] == ["r2"]
        await running.is_back_to_base()


async def test_an_unknown_request_cannot_be_handed_over(stage: StartStage) -> None:
    """Decode restarted, or gave the request up: prefill must end it."""
    async with stage() as running:
        side = running.side
        offer = side.offer("r", prompt(70))
        sampled = await side.compute(offer)

        with pytest.raises(WorkerLost):
            await side.done(offer, sampled)


async def test_a_repeated_handover_is_accepted_again(stage: StartStage) -> None:
    """Prefill repeats it when the answer got lost, perhaps after the request has ended."""
    async with stage() as running:
        side = running.side
        offer = side.offer("r", prompt(70))
        await side.accepted(offer)
        assert await side.accepted(offer) == 0
        sampled = await side.compute(offer)
        await side.done(offer, sampled)
        await side.done(offer, sampled)
        answer = await side.ended(offer)
        await running.is_back_to_base()

        await side.done(offer, sampled)

        assert len(answer.ends) == 1


async def test_a_cancel_that_overtakes_its_offer_still_counts(stage: StartStage) -> None:
    async with stage() as running:
        side = running.side
        offer = side.offer("r", prompt(70))
        await side.cancel(offer)
        await until(lambda: side.beats)

        reply = await side.send(offer)

        assert reply.failure.kind == pb.FAILURE_KIND_CANCELLED
