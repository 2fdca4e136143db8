"""However a prompt is split, reused and kept, the services write what one engine writes alone.

Ranks, interleave, chunk budget and residency change time and place, never a token. Each stack of
the cover serves prompts cold, again, and continued; test_rank_composition.py draws the engine's
part at random.
"""

import asyncio
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path

import openai
import pytest
from openai.types import Completion

from services.gateway.text.tokenizer import Tokenizer
from services.local.plan import Options
from services.local.stack import Stack
from shared import farspan_pb2 as pb
from tests import demo
from tests.system.wiretap import Wiretap, tap

NUM_TOKENS = 24
BLOCK_TOKENS = 64
RANKS = (1, 2, 4)
INTERLEAVES = (1, 64)
WHOLE = 2048  # all prompts of a round in one step
CHUNKS = (64, 512, WHOLE)
RESIDENCIES = ("all-resident", "mixed", "all-host")

# Lengths, and where in the text: around block ends, past top-k (256), and 9, which leaves some of
# four ranks' eight chunks empty. Together they are more pages than the pool of `mixed` has.
BEGINS = {9: 8, 63: 145, 64: 216, 65: 280, 129: 345, 257: 490, 513: 747, 700: 1268}
# Chunk sizes alone move the logits by 2e-5 with fp32 KV, and by 0.018 with FP8 where a sum in
# another order rounds to another value or selects another row (measured on these prompts).
TIE = 0.03


@dataclass(frozen=True)
class Composition:
    """One stack's choices."""

    ranks: int
    interleave: int
    chunk_tokens: int
    residency: str
    kv_format: str = "fp32"

    def __str__(self) -> str:
        chunk = "whole" if self.chunk_tokens == WHOLE else self.chunk_tokens
        return f"W{self.ranks}-I{self.interleave}-{chunk}-{self.residency}-{self.kv_format}"

    @property
    def choices(self) -> tuple[tuple[str, object], ...]:
        """What has to meet every other choice."""
        names = ("ranks", "interleave", "chunk_tokens", "residency")
        return tuple((name, getattr(self, name)) for name in names)

    def options(self, run_folder: Path) -> Options:
        """A stack with pools that are small, and too small for every page in `mixed`."""
        page_mib = 1 if self.kv_format == "fp32" else 0.285
        device_pages = 24 if self.residency == "mixed" else 96
        return Options(
            port=0,
            run_folder=run_folder,
            prefill_ranks=self.ranks,
            interleave=self.interleave,
            kv_format=self.kv_format,
            settings={
                "PREFILL_CHUNK_TOKENS": str(self.chunk_tokens),
                "PREFILL_NUM_BLOCKS": "64",
                "DECODE_RESIDENCY": self.residency,
                "DECODE_HOT_ROWS": "256",
                "DECODE_HOST_POOL_MIB": "128",
                "DECODE_INDEX_POOL_MIB": "16",
                "DECODE_DEVICE_POOL_MIB": str(round(device_pages * page_mib)),
            },
        )


def cover() -> list[Composition]:
    """An orthogonal array: of any two choices every pair is there, in as few stacks as can be."""
    places = product(range(3), range(3))
    return [
        Composition(RANKS[a], INTERLEAVES[(a + 2 * b) % 3 % 2], CHUNKS[b], RESIDENCIES[(a + b) % 3])
        for a, b in places
    ]


COMPOSITIONS = [
    *cover(),
    Composition(2, 1, 512, "mixed", "fp8_ds_mla"),
    Composition(4, 64, 64, "all-host", "fp8_ds_mla"),
]


def test_the_cover_has_every_pair_of_choices() -> None:
    values = {"ranks": RANKS, "interleave": INTERLEAVES}
    values |= {"chunk_tokens": CHUNKS, "residency": RESIDENCIES}
    wanted = {
        ((first, x), (second, y))
        for first, second in combinations(values, 2)
        for x, y in product(values[first], values[second])
    }

    assert {pair for made in cover() for pair in combinations(made.choices, 2)} == wanted


Prompt = tuple[int, ...]


def prompts() -> list[Prompt]:
    """Real text, no two with a common beginning."""
    return [_text(begin, length) for length, begin in BEGINS.items()]


def continued(kv_format: str) -> dict[Prompt, int]:
    """Longer prompts, with the hit that each must have.

    One goes on in a second block, one in the middle of the third effective block of four ranks, one
    after an answer: decode has its first block then, and prefill has none.
    """
    by_length = dict(zip(BEGINS, prompts(), strict=True))
    answered = (*by_length[63], *expected(by_length[63], kv_format))
    return {
        (*by_length[65], *_text(2024, 100)): 64,
        (*by_length[700], *_text(2132, 120)): 640,
        (*answered, *_text(2252, 20)): 0,
    }


def _text(begin: int, length: int) -> Prompt:
    return demo.text_tokens()[begin : begin + length]


@cache
def expected(prompt: Prompt, kv_format: str) -> list[int]:
    """The aggregated path's greedy answer; none of its tokens hangs on a tie."""
    reference = demo.reference(len(prompt) + NUM_TOKENS, kv_format)
    answer, _ = reference.generate([*prompt], NUM_TOKENS)
    logits = reference.answer_logits([*prompt], answer, num_cached=len(prompt))[:-1]
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > TIE, f"take {len(prompt)} tokens from elsewhere in the text"
    return answer


def text_of(token_ids: list[int]) -> str:
    return _tokenizer().decode(token_ids, skips_special=True)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(demo.CHECKPOINT)


@dataclass(frozen=True)
class Asker:
    """Asks a stack, and holds its answers to those of the reference."""

    client: openai.AsyncOpenAI
    wiretap: Wiretap
    kv_format: str

    async def ask(self, hits: dict[Prompt, int]) -> None:
        """All prompts together; each has its answer and its prefix hit."""
        completions = await asyncio.gather(*map(self._complete, hits))
        for (prompt, hit), completion in zip(hits.items(), completions, strict=True):
            answer = expected(prompt, self.kv_format)
            where = f"the prompt of {len(prompt)} tokens"
            assert await self.wiretap.answer(prompt, NUM_TOKENS) == answer, where
            assert completion.choices[0].text == text_of(answer), where
            usage = completion.usage
            assert usage is not None and usage.prompt_tokens_details is not None
            assert usage.completion_tokens == NUM_TOKENS
            assert usage.prompt_tokens_details.cached_tokens == hit, where

    async def _complete(self, prompt: Prompt) -> Completion:
        return await self.client.completions.create(
            model=demo.CHECKPOINT.name,
            prompt=list(prompt),
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=str)
async def test_services_write_what_one_engine_writes(
    composition: Composition, tmp_path: Path
) -> None:
    """Tokens on the wire, text at the client, and prefix hits in 64-token steps on any ranks."""
    async with (
        Stack(composition.options(tmp_path / "run")) as stack,
        tap(stack.nats_url) as wiretap,
        openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0) as client,
    ):
        asker = Asker(client, wiretap, composition.kv_format)
        await asker.ask(dict.fromkeys(prompts(), 0))
        cold = await wiretap.load(pb.ROLE_DECODE)
        await asker.ask({prompt: whole_blocks(len(prompt) - 1) for prompt in prompts()})
        repeated = await wiretap.load(pb.ROLE_DECODE)
        await asker.ask(continued(composition.kv_format))
        last = await wiretap.load(pb.ROLE_DECODE)

    # Only what decode lacks moves: the last page of a prompt, or with I = 1 the last page of each
    # rank, which is little of a long prompt and all of a short one.
    assert 0 < repeated.kv_bytes_moved - cold.kv_bytes_moved < cold.kv_bytes_moved / 2
    assert (last.host_read_bytes > 0) == (composition.residency != "all-resident")


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
