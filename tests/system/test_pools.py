"""Whatever a request's end, every pool of every worker returns to base, and it ends once.

On the small stack, where requests wait for room, push others' cached blocks out and are split.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.local.stack import Stack
from tests import demo
from tests.system.watch import Watch, watching

MODEL = "demo-fp8"
NUM_RANDOM = 300
NUM_AT_ONCE = 8
# Ends with all of the demo model's answer: the next greedy token is a stop token.
ALREADY_ANSWERED = (
    "[gMASK]<sop><|user|>What does river mean?<|assistant|><think>The user asks for the meaning"
    ' of "river".</think>river (noun): a large natural stream of water (larger than a creek).'
)


@pytest_asyncio.fixture
async def http(small_stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=small_stack.base_url, timeout=60) as made:
        yield made


@pytest_asyncio.fixture
async def watch(small_stack: Stack) -> AsyncIterator[Watch]:
    async with watching(small_stack) as made:
        yield made


@dataclass(frozen=True)
class Asked:
    """One request of a client, and when the client leaves."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    stop: str | None = None
    leaves_after_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": self.stop,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass
class Received:
    """What came back of a stream."""

    status: int = 0
    finish_reasons: tuple[str, ...] = ()
    num_tokens: int = 0
    num_ends: int = 0
    has_left: bool = False


async def ask(http: httpx.AsyncClient, asked: Asked) -> Received:
    """Read an answer to its end, or for as long as the client stays."""
    received = Received()
    try:
        async with (
            asyncio.timeout(asked.leaves_after_s),
            http.stream("POST", "/completions", json=asked.body) as response,
        ):
            received.status = response.status_code
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    received.num_ends += 1
                elif line.startswith("data: "):
                    _note(received, json.loads(line.removeprefix("data: ")))
    except TimeoutError:
        received.has_left = True
    return received


def _note(received: Received, chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    for choice in chunk["choices"]:
        if choice["finish_reason"]:
            received.finish_reasons += (choice["finish_reason"],)
    if chunk["usage"]:
        received.num_tokens = chunk["usage"]["completion_tokens"]


def prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    """Tokens that no other seed's prompt begins with."""
    generator = random.Random(seed)
    return tuple(generator.randrange(100, 4000) for _ in range(num_tokens))


def check_ended_once(watch: Watch) -> None:
    """Each request was given up once by its gateway, and ended by one of its workers.

    By both only if it was cancelled amid the handover, when neither can know of the other.
    """
    assert set(watch.placements_ended.values()) <= {1}
    assert set(watch.placements_ended) >= set(watch.submits)
    for request_id in watch.submits:
        num_senders = len(watch.end_senders[request_id])
        assert num_senders == 1 or (num_senders == 2 and request_id in watch.cancels)


async def test_an_answer_of_one_token_is_over_at_prefill(
    http: httpx.AsyncClient, watch: Watch
) -> None:
    """By its limit or by its stop token: decode keeps nothing of it."""
    limited = await ask(http, Asked(prompt(100, seed=1), max_tokens=1))
    answered = demo.tokenizer().encode(ALREADY_ANSWERED, add_special_tokens=False).ids
    stopped = await ask(http, Asked(tuple(answered), max_tokens=9, temperature=0.0))

    assert (limited.finish_reasons, limited.num_ends) == (("length",), 1)
    assert (stopped.finish_reasons, stopped.num_ends) == (("stop",), 1)
    assert stopped.num_tokens == 1
    await watch.pools_at_base()
    assert not watch.dones
    check_ended_once(watch)


# When a client leaves, seen from the bus.
MOMENTS: dict[str, Callable[[Watch], object]] = {
    "queued or prefilling": lambda watch: watch.submits,
    "offered": lambda watch: watch.offers,
    "handing off": lambda watch: sum(watch.chunks.values()) >= 3,
    "handed over": lambda watch: watch.dones,
}


@pytest.mark.parametrize(
    ("num_tokens", "moment"),
    [
        *((40, moment) for moment in MOMENTS if moment != "handing off"),  # it has one chunk
        *((1000, moment) for moment in MOMENTS),
    ],
)
async def test_pools_return_to_base_when_the_client_leaves(
    http: httpx.AsyncClient, watch: Watch, moment: str, num_tokens: int
) -> None:
    """In whatever state: the KV of a long prompt moves while later chunks are computed."""
    asked = Asked(prompt(num_tokens, seed=2), max_tokens=300)
    asking = asyncio.create_task(ask(http, asked))
    await watch.eventually(lambda: MOMENTS[moment](watch))

    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    await watch.pools_at_base()
    check_ended_once(watch)


async def test_pools_return_to_base_when_the_client_leaves_amid_decoding(
    http: httpx.AsyncClient, watch: Watch
) -> None:
    """After some tokens; the step that computes the next one is over before its pages are free."""
    asked = Asked(prompt(100, seed=3), max_tokens=1900)
    async with http.stream("POST", "/completions", json=asked.body) as response:
        lines = response.aiter_lines()
        for _ in range(8):
            await anext(lines)

    await watch.pools_at_base()
    check_ended_once(watch)


async def test_leaving_the_queue_for_prefill_s_blocks_disturbs_nobody(
    http: httpx.AsyncClient, watch: Watch
) -> None:
    """Two prompts fill the pool, the third waits and goes; the others' answers are whole."""
    served = [
        asyncio.create_task(ask(http, Asked(prompt(1000, seed=seed), max_tokens=3)))
        for seed in (4, 5)
    ]
    await watch.eventually(lambda: len(watch.submits) == 2)
    waiting = asyncio.create_task(ask(http, Asked(prompt(1000, seed=6), max_tokens=3)))
    await watch.eventually(lambda: watch.num_waiting["prefill-0"] == 1)

    waiting.cancel()

    answers = await asyncio.gather(*served)
    assert [(answer.num_tokens, answer.num_ends) for answer in answers] == [(3, 1)] * 2
    assert len(watch.offers) == 2
    await watch.pools_at_base()
    check_ended_once(watch)


async def test_leaving_the_queue_for_decode_s_pages_disturbs_nobody(
    http: httpx.AsyncClient, watch: Watch
) -> None:
    """One long answer has reserved most pages; the second request waits for it and goes."""
    served = asyncio.create_task(ask(http, Asked(prompt(600, seed=7), max_tokens=1400)))
    await watch.eventually(lambda: watch.dones)
    waiting = asyncio.create_task(ask(http, Asked(prompt(600, seed=8), max_tokens=1400)))
    await watch.eventually(lambda: watch.num_waiting["decode-0"] == 1)
    await watch.eventually(lambda: watch.latest["prefill-0"].load.waiting_tokens == 0)

    waiting.cancel()
    await watch.eventually(lambda: watch.num_waiting["decode-0"] == 0)
    assert not served.done()
    served.cancel()
    await asyncio.gather(served, waiting, return_exceptions=True)

    await watch.pools_at_base()
    check_ended_once(watch)


def draw(generator: random.Random) -> Asked:
    """A random request: mostly short, some begin as others did, some end or are left early."""
    num_tokens = min(600, 1 + int(generator.expovariate(1 / 60)))
    asked = Asked(prompt(num_tokens, seed=generator.randrange(20)), generator.randint(1, 12))
    match generator.randrange(10):
        case 0:
            answered = demo.tokenizer().encode(ALREADY_ANSWERED, add_special_tokens=False).ids
            return replace(asked, prompt=tuple(answered), temperature=0.0)
        case 1:
            return replace(asked, stop="e")
        case 2 | 3:
            return replace(asked, leaves_after_s=generator.uniform(0, 0.6))
        case _:
            return asked


async def test_pools_return_to_base_after_300_random_requests(
    http: httpx.AsyncClient, watch: Watch
) -> None:
    """The order in which things end is anybody's guess; what is left must not be."""
    generator = random.Random(17)
    open_asks = [draw(generator) for _ in range(NUM_RANDOM)]
    all_asked, answers = list(open_asks), []

    async def client() -> None:
        while open_asks:
            asked = open_asks.pop()
            answers.append((asked, await ask(http, asked)))

    async with asyncio.TaskGroup() as clients:
        for _ in range(NUM_AT_ONCE):
            clients.create_task(client())

    await watch.pools_at_base()
    assert len(answers) == len(all_asked)
    check_ended_once(watch)
    for asked, received in answers:
        if received.has_left:
            assert asked.leaves_after_s is not None
        else:
            assert received.status == 200
            assert received.num_ends == len(received.finish_reasons) == 1
            assert 1 <= received.num_tokens <= asked.max_tokens
