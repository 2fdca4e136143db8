"""What is asked of the sampler holds across a handoff: two real workers, this test as gateway."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import pytest_asyncio
import torch

from services.decode import app as decode_app
from services.decode.config import DecodeConfig
from services.prefill import app as prefill_app
from services.prefill.config import PrefillConfig
from shared import block_hash, bus, subjects
from shared import farspan_pb2 as pb
from shared.bus import Bus
from shared.stop_tokens import stop_token_ids
from tests import demo
from tests.oracles.slow_memory import RoundedMemory
from tests.oracles.slow_quantiser import Fp32Quantiser
from tests.oracles.slow_reference import SlowReference

MODEL, GATEWAY = "demo", "gw-sampling"
ROOT = block_hash.namespace(MODEL, "f1")
PROMPT = tuple(demo.text_tokens()[:50])
STOPS = stop_token_ids(demo.CHECKPOINT)
TOLERANCE = 1e-4
OBJECT = pb.Grammar(
    kind=pb.GRAMMAR_KIND_LARK,
    text="""start: %json {
      "type": "object", "additionalProperties": false, "required": ["kind", "tags"],
      "properties": {
        "kind": {"enum": ["query", "answer"]},
        "tags": {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 5}}
      }, "x-guidance": {"whitespace_flexible": false}
    }""",
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Heard:
    """One answer."""

    tokens: dict[int, int] = field(default_factory=dict)
    messages: list[pb.Tokens] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> list[int]:
        return [token for _, token in sorted(self.tokens.items())]

    @property
    def end(self) -> pb.End:
        return self.messages[-1].end

    def chosen(self) -> list[float]:
        """Each token's logprob."""
        found: dict[int, float] = {}
        for message in self.messages:
            values = np.frombuffer(message.logprobs.chosen, "<f4").tolist()
            found.update(enumerate(values, message.index))
        return [value for _, value in sorted(found.items())]


@dataclass
class Pair:
    """A prefill and a decode worker, and who asks them."""

    bus: Bus
    prefill: pb.WorkerRef
    decode: pb.WorkerRef
    answers: dict[str, Heard] = field(default_factory=dict)

    async def ask(self, ids: tuple[int, ...], num_resumed: int = 0, **asked: object) -> Heard:
        sampling = {"max_new_tokens": 8, "top_p": 1.0, **asked}
        request_id = f"r{len(self.answers)}"
        heard = self.answers[request_id] = Heard()
        submit = pb.Submit(
            request_id=request_id,
            model=MODEL,
            token_ids=block_hash.token_bytes(ids),
            block_hashes=block_hash.pack(block_hash.block_hashes(ROOT, ids)),
            hash_root=ROOT,
            num_resumed_tokens=num_resumed,
            sampling=pb.SamplingParams(**sampling),  # type: ignore[arg-type]
            prefill=self.prefill,
            decode=self.decode,
            gateway_id=GATEWAY,
            deadline_unix_ms=int(time.time() * 1000) + 60_000,
        )
        reply = await self.bus.request(
            subjects.SUBMIT, submit, timeout_s=10, worker=self.prefill.worker_id
        )
        assert reply.HasField("accepted"), reply.failure.message
        async with asyncio.timeout(60):
            await heard.ended.wait()
        return heard

    async def on_batch(self, batch: pb.TokenBatch) -> None:
        for message in batch.messages:
            self._hear(message)

    async def on_end(self, message: pb.Tokens) -> pb.TokensReply:
        heard = self._hear(message)
        heard.ended.set()
        return pb.TokensReply(next_index=message.index + len(message.token_ids) // 4)

    def _hear(self, message: pb.Tokens) -> Heard:
        heard = self.answers[message.request_id]
        heard.messages.append(message)
        heard.tokens.update(enumerate(block_hash.token_ids(message.token_ids), message.index))
        return heard


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(nats_url: str) -> AsyncIterator[Pair]:
    fixed = {"nats_url": nats_url, "checkpoint": demo.CHECKPOINT, "model": MODEL}
    prefill = PrefillConfig(  # type: ignore[arg-type]
        **fixed, worker_id="p-sampling", kv_format="fp32", num_blocks=64, chunk_tokens=64, ranks=2
    )
    decode = DecodeConfig(  # type: ignore[arg-type]
        **fixed,
        worker_id="d-sampling",
        kv_format="fp32",
        host_pool_mib=48,
        device_pool_mib=32,
        index_pool_mib=8,
        drain_s=0.2,
    )
    async with (
        prefill_app.serve(prefill),
        decode_app.serve(decode) as decoding,
        bus.connect(nats_url, "test-gateway") as link,
    ):
        made = Pair(link, await ready(link, prefill.worker_id), decoding.rank.worker)
        async with (
            link.listen(subjects.TOKENS, made.on_batch, gateway=GATEWAY),
            link.answer(subjects.TOKENS_END, made.on_end, gateway=GATEWAY),
        ):
            yield made


async def ready(link: Bus, worker_id: str) -> pb.WorkerRef:
    """The worker's present life."""
    found: asyncio.Future[pb.WorkerRef] = asyncio.get_running_loop().create_future()

    async def hear(beat: pb.Heartbeat) -> None:
        is_ready = beat.state == pb.SERVICE_STATE_READY
        if beat.worker.worker_id == worker_id and is_ready and not found.done():
            found.set_result(beat.worker)

    async with link.listen(subjects.HEARTBEAT, hear), asyncio.timeout(10):
        return await found


@cache
def slow_logprobs(ids: tuple[int, ...]) -> torch.Tensor:  # [n, vocabulary] fp64
    """Of the token after each, by an implementation of its own."""
    slow = SlowReference(demo.CHECKPOINT, RoundedMemory(Fp32Quantiser()))
    return torch.log_softmax(slow.logits(slow.extend(list(ids)).hidden), -1)


def behind(one: object, other: object) -> float:
    return float(np.abs(np.asarray(one) - np.asarray(other)).max())


async def test_logprobs_are_those_of_a_recomputation(pair: Pair) -> None:
    """The first token's, which prefill draws, and all others', whatever was done to the logits."""
    asked = {"frequency_penalty": 0.8, "bias_token_ids": [400], "biases": [3.0]}

    heard = await pair.ask(PROMPT, num_logprobs=2, num_prompt_logprobs=3, **asked)

    exact = slow_logprobs((*PROMPT, *heard.text))
    answer = exact[len(PROMPT) - 1 : -1]
    assert behind(heard.chosen(), answer[torch.arange(8), heard.text]) < TOLERANCE
    first = heard.messages[0]
    assert first.sender == pair.prefill and len(first.logprobs.chosen) == 4
    top = np.frombuffer(first.logprobs.top_logprobs, "<f4")
    assert behind(top, answer[0].topk(2).values) < TOLERANCE
    prompt = np.frombuffer(first.prompt_logprobs.chosen, "<f4")
    assert np.isnan(prompt[0])
    wanted = exact[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert behind(prompt[1:], wanted) < TOLERANCE


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"temperature": 1.0, "seed": 5, "min_p": 0.02}, id="min-p"),
        pytest.param({"frequency_penalty": 1.5, "repetition_penalty": 1.2}, id="penalties"),
        pytest.param({"grammar": OBJECT, "temperature": 1.0, "seed": 2}, id="grammar"),
    ],
)
async def test_one_worker_alone_writes_what_two_do(pair: Pair, asked: dict[str, object]) -> None:
    """max_new_tokens=1 ends on prefill; resumed again and again it writes the same answer."""
    whole = await pair.ask(PROMPT, max_new_tokens=6, num_logprobs=1, **asked)

    answer: list[int] = []
    chosen: list[float] = []
    while len(answer) < len(whole.text):
        ids = (*PROMPT, *answer)
        one = await pair.ask(ids, len(answer), max_new_tokens=1, num_logprobs=1, **asked)
        answer += one.text
        chosen += one.chosen()

    assert answer == whole.text
    assert behind(chosen, whole.chosen()) < TOLERANCE


async def test_json_is_valid_at_temperature_one(pair: Pair) -> None:
    """Ten seeds at once, in steps with one another."""
    asked = {"grammar": OBJECT, "temperature": 1.0, "max_new_tokens": 80}
    asked |= {"stop_token_ids": STOPS, "min_new_tokens": 70}

    answers = await asyncio.gather(*(pair.ask(PROMPT, seed=seed, **asked) for seed in range(10)))

    for heard in answers:
        assert heard.end.reason == pb.FINISH_REASON_STOP
        assert heard.text[-1] in STOPS
        found = json.loads(demo.tokenizer().decode(heard.text[:-1]))
        assert set(found) == {"kind", "tags"}


async def test_stages_of_both_workers_are_told(pair: Pair) -> None:
    heard = await pair.ask(tuple(demo.text_tokens()[200:400]))

    names = [stage.name for message in heard.messages for stage in message.stages]
    assert names[:5] == ["prefill.queue", *["prefill.chunk"] * 4][:5]
    assert names[-1] == "decode.generate"
    assert {"prefill.first_token", "decode.queue", "handoff.pull"} < set(names)
