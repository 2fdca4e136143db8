"""Decode on a GPU: wherever rows lie no bit changes, and tokens are the CPU engine's.

Without a GPU the same code runs step by step: Triton's kernels in the interpreter, and the two that
have none as their references.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from shared.engine import tiles
from shared.engine.comm import RankGroup
from shared.engine.decode_step import DecodeRow, hidden_from_bytes
from shared.engine.gpu import decode_kv
from shared.engine.gpu.backend import GpuBackend
from shared.engine.gpu.decode_engine import GpuDecodeEngine
from shared.engine.gpu.decode_step import DecodeStep
from shared.engine.gpu.tier import GpuSequence, GpuTier
from shared.engine.kernels.reference import indexing, sparse_decode
from shared.engine.kv.format import make_format, page_geometry
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.residency import ResidencyMode, make_policy
from shared.engine.kv.tier_pools import TierPools, TierShape
from shared.engine.model.config import load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.open_decode import DecodeEngineSettings, index_groups, open_decode_engine
from shared.engine.step import Sampled, Sampling, Shaping
from tests import demo

HAS_GPU = torch.cuda.is_available()
NUM_NEW = 64 if HAS_GPU else 3
MAX_ROWS = 4
RESIDENCIES = ["all-resident", "mixed", "all-host"]
PARTS = (slice(0, 700), slice(900, 963), slice(1500, 1756))
BLOCKS_EACH = 14
# All pages fit, but in the mixed tier they leave less than it wants free.
DEVICE_POOL_MIB = {"all-resident": 12, "mixed": 7, "all-host": 12}
PAGE_BYTES = 7 * 64 * 656
FEWEST_EQUAL, FEWEST_SURE_EQUAL, SURE = 0.9, 0.99, 1.0


@dataclass(frozen=True)
class Prompt:
    """What the CPU's aggregated engine makes of a part of the text."""

    token_ids: list[int]
    source: demo.Reference
    first: Sampled


@cache
def prompts() -> list[Prompt]:
    made = []
    for part in PARTS:
        token_ids = list(demo.text_tokens()[part])
        source = demo.reference(len(token_ids), "fp8_ds_mla")
        made.append(Prompt(token_ids, source, source.prefill(token_ids, 512, Sampling())))
    return made


@contextmanager
def opened(residency: str) -> Iterator[GpuDecodeEngine]:
    """On a GPU as the service opens it."""
    if HAS_GPU:
        settings = DecodeEngineSettings(
            checkpoint=demo.CHECKPOINT,
            kv_format="fp8_ds_mla",
            host_pool_mib=96,
            device_pool_mib=DEVICE_POOL_MIB[residency],
            index_pool_mib=16,
            hot_rows=512,
            residency=ResidencyMode(residency),
            device="cuda:0",
            max_sequences=MAX_ROWS,
        )
        with open_decode_engine(settings) as engine:
            yield engine
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kv, "top_k", indexing.top_k)
        patch.setattr(decode_kv, "sparse_mla_decode", attend)
        yield step_by_step(residency)


def attend(query: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = sparse_decode.sparse_mla_decode(query, *rest)
    return out.to(query.dtype), lse


def step_by_step(residency: str) -> GpuDecodeEngine:
    tiles.use(1)
    num_device_pages = (DEVICE_POOL_MIB[residency] << 20) // PAGE_BYTES
    config, cpu = load_config(demo.CHECKPOINT), torch.device("cpu")
    kv_format = make_format("fp8_ds_mla", config.attention)
    shape = TierShape(
        num_mla_layers=config.num_kv_layers,
        num_index_layers=len(config.index_layers),
        row_bytes=kv_format.row_bytes,
        index_page_bytes=page_geometry(kv_format).page_bytes,
        num_host_pages=BLOCKS_EACH * MAX_ROWS,
        num_device_pages=num_device_pages,
    )
    policy = make_policy(
        ResidencyMode(residency),
        hot_rows=512,
        union_rows=config.attention.index_topk,
        num_device_pages=num_device_pages,
    )
    group = RankGroup()
    model = Transformer(
        config, load_weights(demo.CHECKPOINT, config, group, GpuBackend(cpu)), group
    )
    tier = GpuTier(TierPools(shape), index_groups(config), policy, MAX_ROWS)
    step = DecodeStep(model, tier, MAX_ROWS)
    # One row of padding more than wanted, as a captured step may have.
    return GpuDecodeEngine(step, lambda rows, pages: step.run(rows + 1, pages), policy)


class Running:
    """One sequence that decodes greedily, or with the given sampling."""

    def __init__(self, engine: GpuDecodeEngine, prompt: Prompt, place: int) -> None:
        self.prompt = prompt
        num_blocks = -(-(len(prompt.token_ids) + NUM_NEW) // BLOCK_TOKENS)
        self.blocks = [place * BLOCKS_EACH + number for number in range(num_blocks)][::-1]
        self.sequence: GpuSequence = engine.tier.open(self.blocks)
        self.tokens = [prompt.first.token_id]
        self.hidden = hidden_from_bytes(prompt.first.last_hidden, engine.config.hidden_size)
        pools, source = engine.tier.pools, prompt.source.pool
        host_pages = pools.host_rows.unflatten(1, (-1, BLOCK_TOKENS))
        for page in range(len(source.rows)):
            host_pages[:, self.blocks[page]] = source.rows[page]
            pools.index_pages[:, self.blocks[page]] = source.index_pages[page].to(
                pools.index_pages.device
            )

    def row(self, sampling: Sampling) -> DecodeRow[GpuSequence]:
        position = len(self.prompt.token_ids) + len(self.tokens) - 1
        return DecodeRow(self.sequence, self.tokens[-1], position, self.hidden, sampling)

    def kv(self, pools: TierPools) -> torch.Tensor:
        """Rows of all layers as bytes."""
        num_rows = len(self.prompt.token_ids) + len(self.tokens) - 1
        pages = pools.host_rows.unflatten(1, (-1, BLOCK_TOKENS))[:, self.blocks]
        return pages.flatten(1, 2)[:, :num_rows].clone()


@dataclass(frozen=True)
class Decoded:
    tokens: list[list[int]]
    hidden: list[torch.Tensor]
    kv: list[torch.Tensor]
    num_misses: int


@cache
def decoded(residency: str) -> Decoded:
    """All prompts in one batch; on a GPU no step may wait for the device but for its tokens."""
    with opened(residency) as engine:
        running = [Running(engine, prompt, place) for place, prompt in enumerate(prompts())]
        with no_waiting():
            for _ in range(NUM_NEW - 1):
                outputs = engine.step([sequence.row(Sampling()) for sequence in running])
                for sequence, output in zip(running, outputs, strict=True):
                    sequence.tokens.append(output.token_id)
                    sequence.hidden = output.hidden
        result = Decoded(
            tokens=[sequence.tokens for sequence in running],
            hidden=[sequence.hidden.cpu() for sequence in running],
            kv=[sequence.kv(engine.tier.pools) for sequence in running],
            num_misses=sum(counters.misses for counters in engine.tier.counters),
        )
        for sequence in running:
            engine.tier.close(sequence.sequence)
        engine.tier.check_integrity()
    return result


@contextmanager
def no_waiting() -> Iterator[None]:
    """torch raises where the host would wait for the device."""
    with ExitStack() as stack:
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode("error")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield


@pytest.mark.parametrize("residency", ["mixed", "all-host"])
def test_residency_changes_no_bit(residency: str) -> None:
    """Rows come from the host instead, yet every token, hidden state and cached byte is equal."""
    expected, result = decoded("all-resident"), decoded(residency)

    assert expected.num_misses == 0 < result.num_misses
    assert result.tokens == expected.tokens
    for ours, theirs in zip(result.hidden + result.kv, expected.hidden + expected.kv, strict=True):
        assert torch.equal(ours, theirs)


def test_tokens_are_the_cpu_engines() -> None:
    """Given what was drawn so far; but for roundings to bf16 where the CPU is not sure."""
    equal, sure_equal = [], []
    for prompt, tokens in zip(prompts(), decoded("all-resident").tokens, strict=True):
        for best, is_sure, token in cpu_choices(prompt, tokens):
            equal.append(best == token)
            if is_sure:
                sure_equal.append(best == token)

    assert sum(equal) >= FEWEST_EQUAL * len(equal), (sum(equal), len(equal))
    assert sum(sure_equal) >= FEWEST_SURE_EQUAL * len(sure_equal), sure_equal


def cpu_choices(prompt: Prompt, tokens: list[int]) -> Iterator[tuple[int, bool, int]]:
    """The CPU's greedy token after the prompt and each of our tokens, whether it is sure, ours."""
    reference = demo.reference(len(prompt.token_ids) + len(tokens), "fp8_ds_mla")
    best = reference.answer_logits(prompt.token_ids, tokens[:-1], 0).topk(2, -1)
    for values, indices, token in zip(best.values, best.indices, tokens, strict=True):
        yield int(indices[0]), float(values[0] - values[1]) > SURE, token


def steps(engine: GpuDecodeEngine, sequence: Running, num_steps: int) -> list[int]:
    for _ in range(num_steps):
        (output,) = engine.step([sequence.row(Sampling())])
        sequence.tokens.append(output.token_id)
        sequence.hidden = output.hidden
    return sequence.tokens


def test_who_takes_a_closed_sequences_blocks_and_slot_reads_its_own_rows() -> None:
    """Hot rows and pages of the one before are gone."""
    with opened("all-host") as engine:
        expected = steps(engine, Running(engine, prompts()[2], 0), 2)
    with opened("all-host") as engine:
        before = Running(engine, prompts()[0], 0)
        steps(engine, before, 2)
        engine.tier.close(before.sequence)

        after = Running(engine, prompts()[2], 0)

        assert after.sequence.slot == before.sequence.slot
        assert steps(engine, after, 2) == expected


def test_a_step_may_be_repeated() -> None:
    """After a failure each sequence is stepped alone: what was written is written again."""
    with opened("all-host") as engine:
        sequence = Running(engine, prompts()[2], 0)
        steps(engine, sequence, 1)
        first, second = (engine.step([sequence.row(Sampling())]) for _ in range(2))

    assert first[0].token_id == second[0].token_id
    assert torch.equal(first[0].hidden, second[0].hidden)


def test_a_step_tells_logprobs_and_draws_what_is_allowed_without_waiting() -> None:
    """In the one message to the host that there is; beside a row that asks for nothing."""
    with opened("all-resident") as engine:
        asking, silent = (Running(engine, prompts()[2], place) for place in range(2))
        told = Sampling(num_logprobs=3)
        with no_waiting():
            silently, output = engine.step([silent.row(Sampling()), asking.row(told)])
        assert silently.logprobs is None and output.logprobs is not None
        top = np.frombuffer(output.logprobs.top_token_ids, "<u4").tolist()
        assert top[0] == output.token_id == silently.token_id

        allowed = np.zeros(engine.config.vocab_size, np.bool_)
        allowed[top[2]] = True
        shaping = Shaping(allowed=np.packbits(allowed, bitorder="little"))
        with no_waiting():
            (shaped,) = engine.step([asking.row(replace(told, shaping=shaping))])

    assert shaped.token_id == top[2] and shaped.logprobs is not None
    assert shaped.logprobs.top_token_ids == output.logprobs.top_token_ids
    assert shaped.logprobs.chosen == shaped.logprobs.top_logprobs[8:]


@pytest.mark.gpu  # the interpreter raises by itself
def test_a_cached_row_that_is_no_number_breaks_its_step_and_no_other() -> None:
    """No token of it may leave."""
    with opened("all-resident") as engine:
        expected = steps(engine, Running(engine, prompts()[2], 2), 2)
        broken, whole = (Running(engine, prompts()[2], place) for place in range(2))
        rows = engine.tier.pools.host_rows.unflatten(1, (-1, BLOCK_TOKENS))
        rows[:, broken.blocks[0], :, 528:] = 0xFF  # rotary values: bf16 NaN

        with pytest.raises(FloatingPointError):
            steps(engine, broken, 1)

        assert steps(engine, whole, 2) == expected


def test_more_sequences_than_slots_are_refused() -> None:
    """Admission counts them; one more is our fault and must not overwrite another's blocks."""
    with opened("all-resident") as engine:
        for place in range(MAX_ROWS):
            engine.tier.open([place])

        with pytest.raises(RuntimeError, match="open already"):
            engine.tier.open([MAX_ROWS])
        engine.tier.check_integrity()
