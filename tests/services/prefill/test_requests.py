"""Every accepted request ends exactly once, its blocks come back, and decode hears what it must."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from shared import farspan_pb2 as pb
from shared import subjects
from shared.block_hash import token_ids
from shared.errors import WorkerLost
from tests.demo import tokenizer
from tests.services.prefill.stage import FakeEngine, Stage, made_up, stage, until

PROMPT = list(range(300))
_workers = (f"p-{i}" for i in itertools.count())


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest_asyncio.fixture
async def on_stage(nats_url: str, engine: FakeEngine) -> AsyncIterator[Stage]:
    async with stage(nats_url, next(_workers), engine, lease_s=2.0) as made:
        yield made


async def test_a_request_is_prefilled_handed_over_and_released(on_stage: Stage) -> None:
    """The whole path: offer, chunks, first token, done, release; the end is decode's to send."""
    await on_stage.accepted(on_stage.request(PROMPT))
    await until(lambda: on_stage.decode.dones)

    (offer,) = on_stage.decode.offers
    assert token_ids(offer.token_ids) == PROMPT
    assert [ref.generation for ref in offer.blocks] == [1] * 5
    assert offer.hash_root and offer.lease_ms == 2000 and offer.ranks
    (first,) = on_stage.gateway.tokens
    assert (first.index, token_ids(first.token_ids), first.sender) == (0, [7], on_stage.ref)
    (done,) = on_stage.decode.dones
    assert (done.first_token_id, done.last_hidden) == (7, b"hidden")
    assert not on_stage.is_at_base()

    await on_stage.decode.release(on_stage.ref)
    await until(on_stage.is_at_base)
    assert not on_stage.gateway.ends and not on_stage.decode.aborts


async def test_decode_hears_of_each_chunk_that_it_can_pull(
    on_stage: Stage, engine: FakeEngine
) -> None:
    """KV moves while later chunks are computed."""
    engine.hold()
    engine.is_stepwise = True
    await on_stage.accepted(on_stage.request(PROMPT))
    await until(lambda: on_stage.decode.offers)
    for count in (1, 2, 3):
        engine.may_run.set()
        await until(lambda expected=count: len(on_stage.decode.chunks) == expected)

    ready = [chunk.num_ready_tokens for chunk in on_stage.decode.chunks]
    assert ready == [128, 256, 300]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        pytest.param({"max_new_tokens": 1}, pb.FINISH_REASON_LENGTH, id="one-token"),
        pytest.param({"stop_token_ids": [7]}, pb.FINISH_REASON_STOP, id="stop-token"),
    ],
)
async def test_an_answer_of_one_token_ends_here(
    on_stage: Stage, sampling: dict[str, object], reason: pb.FinishReason
) -> None:
    """Decode is not needed; if it knows of the request, it must drop it."""
    await on_stage.accepted(on_stage.request(PROMPT, **sampling))

    end = await on_stage.end()
    assert end.reason == reason
    assert (end.usage.prompt_tokens, end.usage.generated_tokens) == (300, 1)
    assert token_ids(on_stage.gateway.ends[0].token_ids) == [7]
    await until(on_stage.is_at_base)
    await until(lambda: len(on_stage.decode.aborts) == len(on_stage.decode.offers))
    assert len(on_stage.decode.offers) == ("stop_token_ids" in sampling)


async def test_a_resumed_answer_continues_at_its_index(on_stage: Stage, engine: FakeEngine) -> None:
    """The generator's place and the message's index count the tokens sent before."""
    await on_stage.accepted(on_stage.request(PROMPT, num_resumed_tokens=10, seed=3))
    await until(lambda: on_stage.gateway.tokens)

    sampling = engine.steps[-1].chunks[0].sampling
    assert sampling is not None
    assert (sampling.index, sampling.seed) == (10, 3)
    assert on_stage.gateway.tokens[0].index == 10


@pytest.mark.parametrize(
    ("minimum", "banned"), [pytest.param(0, (), id="free"), pytest.param(2, (5, 6), id="banned")]
)
async def test_stop_tokens_are_banned_until_the_minimum(
    on_stage: Stage, engine: FakeEngine, minimum: int, banned: tuple[int, ...]
) -> None:
    await on_stage.accepted(on_stage.request(PROMPT, min_new_tokens=minimum, stop_token_ids=[5, 6]))
    await until(lambda: on_stage.gateway.tokens)

    sampling = engine.steps[-1].chunks[0].sampling
    assert sampling is not None and sampling.banned_token_ids == banned


async def test_a_refused_offer_ends_the_request_with_that_reason(
    on_stage: Stage, engine: FakeEngine
) -> None:
    """The gateway retries elsewhere, and need not wait for the prompt to be computed."""
    engine.hold()
    on_stage.decode.refusal = pb.Failure(kind=pb.FAILURE_KIND_OVERLOADED, message="full")
    await on_stage.accepted(on_stage.request(PROMPT))

    end = await on_stage.end()
    assert (end.reason, end.failure.kind) == (pb.FINISH_REASON_FAILED, pb.FAILURE_KIND_OVERLOADED)
    await until(on_stage.is_at_base)
    assert not on_stage.decode.aborts
    engine.may_run.set()


async def test_an_offer_to_nobody_ends_the_request_as_lost(on_stage: Stage) -> None:
    gone = pb.WorkerRef(worker_id="gone", epoch=1)
    await on_stage.accepted(on_stage.request(PROMPT, decode=gone))

    end = await on_stage.end()
    assert end.failure.kind == pb.FAILURE_KIND_WORKER_LOST
    await until(on_stage.is_at_base)


STATES = ["queued", "computing", "offering", "handing-over", "handed-over"]


async def bring_to(on_stage: Stage, engine: FakeEngine, state: str) -> None:
    """Submit a request and let it get as far as `state`."""
    if state == "queued":
        engine.hold()
        await on_stage.accepted(on_stage.request([1] * 1920, "big"))  # takes 30 of 32 blocks
        await until(lambda: engine.is_running)
    if state == "computing":
        engine.hold()
    if state == "offering":
        on_stage.decode.may_answer.clear()
    on_stage.decode.is_deaf_to_done = state == "handing-over"
    await on_stage.accepted(on_stage.request(PROMPT))
    reached = {
        "queued": lambda: on_stage.prefill.worker.load().num_waiting,
        "computing": lambda: engine.is_running and on_stage.decode.offers,
        "offering": lambda: on_stage.gateway.tokens and on_stage.decode.offers,
        "handing-over": lambda: on_stage.decode.dones,
        "handed-over": lambda: on_stage.decode.dones,
    }
    await until(reached[state])
    if state == "handed-over":
        await asyncio.sleep(0.05)  # until the answer to PREFILL_DONE is back


@pytest.mark.parametrize("state", STATES)
async def test_a_cancel_in_any_state_frees_the_blocks(
    on_stage: Stage, engine: FakeEngine, state: str
) -> None:
    await bring_to(on_stage, engine, state)

    await on_stage.cancel()

    if state == "handed-over":
        await until(on_stage.is_at_base)
        assert not on_stage.gateway.ends
        return
    end = await on_stage.end()
    assert end.failure.kind == pb.FAILURE_KIND_CANCELLED
    await on_stage.cancel("big")
    engine.may_run.set()
    await until(on_stage.is_at_base)
    aborts = [abort for abort in on_stage.decode.aborts if abort.request_id == "r"]
    assert [abort.failure.kind for abort in aborts] == [end.failure.kind] * (state != "queued")


@pytest.mark.parametrize("state", STATES)
async def test_the_deadline_ends_a_request_in_any_state(
    on_stage: Stage, engine: FakeEngine, state: str
) -> None:
    """A deadline that only some states watch is a request that hangs in the others."""
    request = on_stage.request

    def short(ids: list[int], request_id: str = "r", **changes: object) -> pb.Submit:
        soon = int(time.time() * 1000) + 600
        return request(ids, request_id, deadline_unix_ms=soon, **changes)

    on_stage.request = short  # type: ignore[method-assign]
    await bring_to(on_stage, engine, state)

    await until(on_stage.is_at_base)
    if state != "handed-over":
        await until(lambda: on_stage.gateway.ends)
        kinds = {end.end.failure.kind for end in on_stage.gateway.ends}
        assert kinds == {pb.FAILURE_KIND_DEADLINE}
    else:
        assert not on_stage.gateway.ends
    engine.may_run.set()


@pytest.mark.parametrize("state", ["computing", "handing-over", "handed-over"])
async def test_decode_may_abort_in_any_state(
    on_stage: Stage, engine: FakeEngine, state: str
) -> None:
    """Prefill ends the request with decode's reason, unless decode answers for it already."""
    await bring_to(on_stage, engine, state)

    await on_stage.decode.abort(on_stage.ref, pb.FAILURE_KIND_OVERLOADED)

    await until(on_stage.is_at_base)
    if state == "handed-over":
        assert not on_stage.gateway.ends
    else:
        assert (await on_stage.end()).failure.kind == pb.FAILURE_KIND_OVERLOADED
    assert not on_stage.decode.aborts
    engine.may_run.set()


async def test_an_abort_of_another_life_changes_nothing(
    on_stage: Stage, engine: FakeEngine
) -> None:
    await bring_to(on_stage, engine, "computing")
    on_stage.decode.ref = pb.WorkerRef(worker_id=on_stage.decode.ref.worker_id, epoch=4)

    await on_stage.decode.abort(on_stage.ref, pb.FAILURE_KIND_OVERLOADED)
    engine.may_run.set()

    await until(lambda: on_stage.decode.dones)
    assert not on_stage.gateway.ends


async def test_a_lease_that_is_not_renewed_ends_the_request(
    on_stage: Stage, engine: FakeEngine
) -> None:
    """A decode worker that died must not pin blocks, and the gateway should hear of it."""
    await bring_to(on_stage, engine, "computing")

    end = await on_stage.end()

    assert end.failure.kind == pb.FAILURE_KIND_WORKER_LOST
    engine.may_run.set()
    await until(on_stage.is_at_base)


async def test_renewals_keep_the_blocks_beyond_the_first_lease(
    on_stage: Stage, engine: FakeEngine
) -> None:
    """Leases run from queueing, also where decode waits for room for longer than a lease."""
    await bring_to(on_stage, engine, "handed-over")

    for _ in range(12):  # 3 s of a lease of 2 s
        await on_stage.decode.renew(on_stage.ref)
        await asyncio.sleep(0.25)

    assert not on_stage.is_at_base()
    await until(on_stage.is_at_base)  # and then it ends, silently: decode answers
    assert not on_stage.gateway.ends


async def test_a_renewal_of_what_is_gone_is_denied(on_stage: Stage) -> None:
    """An abort that got lost is told again."""
    await on_stage.decode.renew(on_stage.ref, "unknown")

    await until(lambda: on_stage.decode.aborts)
    assert on_stage.decode.aborts[0].failure.kind == pb.FAILURE_KIND_WORKER_LOST


async def test_a_lost_answer_to_done_is_asked_for_again(on_stage: Stage) -> None:
    on_stage.decode.is_deaf_to_done = True
    await on_stage.accepted(on_stage.request(PROMPT))
    await until(lambda: on_stage.decode.dones)
    on_stage.decode.is_deaf_to_done = False

    for _ in range(20):
        await on_stage.decode.renew(on_stage.ref)
        await asyncio.sleep(0.2)
        if len(on_stage.decode.dones) == 2:
            break

    assert len(on_stage.decode.dones) == 2
    await on_stage.decode.release(on_stage.ref)
    await until(on_stage.is_at_base)
    assert not on_stage.gateway.ends


async def test_decode_may_refuse_at_the_last_moment(on_stage: Stage) -> None:
    """A restarted decode worker knows nothing of the offer: that is an answer, not silence."""
    on_stage.decode.done_error = WorkerLost("not on this worker")
    await on_stage.accepted(on_stage.request(PROMPT))

    end = await on_stage.end()

    assert end.failure.kind == pb.FAILURE_KIND_WORKER_LOST
    assert token_ids(on_stage.gateway.ends[0].token_ids) == [7]
    assert len(on_stage.decode.dones) == 1
    await until(on_stage.is_at_base)


async def test_a_release_before_the_prompt_is_complete_gives_it_up(
    on_stage: Stage, engine: FakeEngine
) -> None:
    await bring_to(on_stage, engine, "computing")

    await on_stage.decode.release(on_stage.ref)

    assert (await on_stage.end()).failure.kind == pb.FAILURE_KIND_WORKER_LOST
    engine.may_run.set()
    await until(on_stage.is_at_base)


async def test_an_end_is_repeated_until_it_was_heard(on_stage: Stage) -> None:
    on_stage.gateway.num_deaf = 3
    await on_stage.accepted(on_stage.request(PROMPT, max_new_tokens=1))

    assert (await on_stage.end()).reason == pb.FINISH_REASON_LENGTH


async def test_a_first_token_is_sent_again_when_asked_for(on_stage: Stage) -> None:
    """Also after the handoff: decode may not be asked before its own tokens have arrived."""
    await on_stage.accepted(on_stage.request(PROMPT))
    await until(lambda: on_stage.decode.dones)
    await on_stage.decode.release(on_stage.ref)
    await until(on_stage.is_at_base)

    for index in (0, 1):
        resend = pb.ResendTokens(request_id="r", from_index=index)
        await on_stage.bus.publish(subjects.RESEND_TOKENS, resend, worker=on_stage.ref.worker_id)

    await until(lambda: len(on_stage.gateway.tokens) == 2)
    assert on_stage.gateway.tokens[0] == on_stage.gateway.tokens[1]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        pytest.param({"token_ids": b"\1\0\0"}, pb.FAILURE_KIND_BAD_REQUEST, id="broken-token"),
        pytest.param({"hash_root": b""}, pb.FAILURE_KIND_BAD_REQUEST, id="no-root"),
        pytest.param({"model": "other"}, pb.FAILURE_KIND_BAD_REQUEST, id="model"),
        pytest.param({"gateway_id": "a.b"}, pb.FAILURE_KIND_BAD_REQUEST, id="gateway-id"),
        pytest.param({"top_p": 0.0}, pb.FAILURE_KIND_BAD_REQUEST, id="top-p"),
        pytest.param({"max_new_tokens": 4000}, pb.FAILURE_KIND_TOO_LONG, id="context"),
        pytest.param({"deadline_unix_ms": 1}, pb.FAILURE_KIND_DEADLINE, id="deadline"),
        pytest.param(
            {"prefill": pb.WorkerRef(worker_id="p-0", epoch=1)},
            pb.FAILURE_KIND_WORKER_LOST,
            id="another-life",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_at_once(
    on_stage: Stage, changes: dict[str, object], kind: pb.FailureKind
) -> None:
    assert await on_stage.refused(on_stage.request(PROMPT, **changes)) == kind
    assert on_stage.is_at_base()


async def test_a_prompt_no_pool_could_hold_is_refused(on_stage: Stage) -> None:
    """Waiting for blocks that do not exist would be waiting for the deadline."""
    assert await on_stage.refused(on_stage.request([1] * 2049)) == pb.FAILURE_KIND_TOO_LONG


async def test_a_request_id_is_taken_once(on_stage: Stage, engine: FakeEngine) -> None:
    await bring_to(on_stage, engine, "computing")

    refused = await on_stage.refused(on_stage.request(PROMPT))

    assert refused == pb.FAILURE_KIND_BAD_REQUEST
    engine.may_run.set()
    await until(lambda: on_stage.decode.dones)


async def test_the_first_token_tells_what_prefill_did_and_when(on_stage: Stage) -> None:
    """Stages have the names of their spans; times do not go back."""
    await on_stage.accepted(on_stage.request(PROMPT))
    await until(lambda: on_stage.gateway.tokens)

    stages = on_stage.gateway.tokens[0].stages
    told = [(stage.name, stage.num_tokens) for stage in stages]
    assert told == [
        ("prefill.queue", 300),
        ("prefill.chunk", 128),
        ("prefill.chunk", 128),
        ("prefill.chunk", 44),
        ("prefill.first_token", 1),
    ]
    times = [time for stage in stages for time in (stage.begin_unix_us, stage.end_unix_us)]
    assert times == sorted(times)


async def test_the_first_token_s_logprobs_go_to_the_gateway_and_to_decode(on_stage: Stage) -> None:
    """Decode may have to send the token again."""
    await on_stage.accepted(on_stage.request(PROMPT, num_logprobs=2))
    await until(lambda: on_stage.decode.dones)

    assert on_stage.gateway.tokens[0].logprobs == made_up(1, 2)
    assert on_stage.decode.dones[0].first_logprobs == made_up(1, 2)


async def test_an_end_sent_here_repeats_all_that_was_told(on_stage: Stage) -> None:
    """The first message may be lost."""
    await on_stage.accepted(
        on_stage.request(PROMPT, max_new_tokens=1, num_logprobs=2, num_prompt_logprobs=1)
    )
    await on_stage.end()

    (first,), (last,) = on_stage.gateway.tokens, on_stage.gateway.ends
    assert last.logprobs == first.logprobs and last.stages == first.stages
    assert last.prompt_logprobs.SerializeToString() == first.prompt_logprobs.SerializeToString()
    assert len(first.prompt_logprobs.chosen) == 4 * 300
    assert not first.HasField("end")


async def test_logprobs_are_those_of_the_prompt_and_not_of_what_was_resumed(
    on_stage: Stage,
) -> None:
    await on_stage.accepted(on_stage.request(PROMPT, num_resumed_tokens=20, num_prompt_logprobs=3))
    await until(lambda: on_stage.gateway.tokens)

    told = on_stage.gateway.tokens[0].prompt_logprobs
    assert (len(told.chosen), len(told.top_token_ids)) == (4 * 280, 4 * 280 * 3)
    assert np.isnan(np.frombuffer(told.chosen, "<f4")).tolist() == [True] + [False] * 279


async def test_a_prompt_whose_logprobs_are_wanted_has_no_hits(on_stage: Stage) -> None:
    """Nor does its usage tell of any; the next prompt finds its blocks."""
    cached = []
    for request_id, asked in (("a", {}), ("b", {"num_prompt_logprobs": 0}), ("c", {})):
        submit = on_stage.request(PROMPT, request_id, max_new_tokens=1, **asked)
        await on_stage.accepted(submit)
        cached.append((await on_stage.end()).usage.cached_tokens)
        on_stage.gateway.ends.clear()
        await until(on_stage.is_at_base)

    assert cached == [0, 0, 256]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"num_logprobs": 21}, id="logprobs"),
        pytest.param({"min_p": 2.0}, id="min-p"),
        pytest.param({"bias_token_ids": [1]}, id="bias"),
        pytest.param({"grammar": pb.Grammar(text="start: /a/")}, id="kind-of-grammar"),
    ],
)
async def test_what_cannot_be_drawn_is_refused(on_stage: Stage, asked: dict[str, object]) -> None:
    """At once: nothing is computed for it."""
    assert await on_stage.refused(on_stage.request(PROMPT, **asked)) == pb.FAILURE_KIND_BAD_REQUEST
    assert on_stage.is_at_base()


async def test_a_first_token_keeps_to_the_grammar(nats_url: str, engine: FakeEngine) -> None:
    """One that cannot be used is refused at the door."""
    engine.vocab_size = 4096
    grammar = pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text="start: /(a|b)+/")
    bad = pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text="start: missing")
    async with stage(nats_url, next(_workers), engine) as made:
        await made.accepted(made.request(PROMPT, grammar=grammar))
        await until(lambda: made.gateway.tokens)
        refusal = await made.refused(made.request(PROMPT, "bad", grammar=bad))

    assert refusal == pb.FAILURE_KIND_BAD_REQUEST
    sampling = engine.steps[-1].chunks[0].sampling
    assert sampling and sampling.shaping and sampling.shaping.allowed is not None
    allowed = np.flatnonzero(np.unpackbits(sampling.shaping.allowed, bitorder="little")).tolist()
    assert {tokenizer().id_to_token(token)[0] for token in allowed} == {"a", "b"}


async def test_a_cancel_that_overtakes_its_request_still_counts(on_stage: Stage) -> None:
    """It may come while a grammar is compiled: nothing is computed for nobody."""
    await on_stage.cancel("r")

    assert await on_stage.refused(on_stage.request(PROMPT)) == pb.FAILURE_KIND_CANCELLED
    assert on_stage.is_at_base()
