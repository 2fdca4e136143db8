"""Decode through the tiers gives the aggregated engine's tokens and bytes, wherever rows lie."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from shared.engine.decode_step import DecodeEngine, DecodeRow, hidden_from_bytes
from shared.engine.kv.host_tier import TieredSequence
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.residency import ResidencyMode
from shared.engine.kv.tier_pools import TierPools
from shared.engine.open_decode import DecodeEngineSettings, open_decode_engine
from shared.engine.step import Sampled, Sampling
from shared.errors import ConfigError
from tests import demo

NUM_NEW = 24
FORMATS = ["fp32", "fp8_ds_mla"]
RESIDENCIES = ["all-resident", "mixed", "all-host"]


def settings(kv_format: str, residency: str, device_pool_mib: int = 24) -> DecodeEngineSettings:
    return DecodeEngineSettings(
        checkpoint=demo.CHECKPOINT,
        kv_format=kv_format,
        host_pool_mib=96,
        device_pool_mib=device_pool_mib,
        index_pool_mib=16,
        hot_rows=512,
        residency=ResidencyMode(residency),
    )


@dataclass(frozen=True)
class Prompt:
    """What the aggregated engine makes of a part of the text."""

    token_ids: list[int]
    source: demo.Reference  # its pool holds the prompt only, as prefill hands it over
    first: Sampled
    whole: demo.Reference  # its pool holds the answer too
    answer: list[int]


@cache
def prompts(kv_format: str) -> list[Prompt]:
    """Longer than what stays whole, shorter than a page, and between."""
    made = []
    for part in (slice(0, 700), slice(900, 963), slice(1000, 1340)):
        token_ids = list(demo.text_tokens()[part])
        source = demo.reference(len(token_ids), kv_format)
        first = source.prefill(token_ids, 512, Sampling())
        whole = demo.reference(len(token_ids) + NUM_NEW, kv_format)
        answer, _ = whole.generate(token_ids, NUM_NEW)
        made.append(Prompt(token_ids, source, first, whole, answer))
    return made


class Running:
    """One sequence that decodes greedily."""

    def __init__(self, engine: DecodeEngine[TieredSequence], prompt: Prompt, blocks: range) -> None:
        self.prompt = prompt
        self.blocks = list(blocks)
        self.sequence: TieredSequence = engine.tier.open(self.blocks)
        self._import(engine.tier.pools)
        self.tokens = [prompt.first.token_id]
        self.hidden = hidden_from_bytes(prompt.first.last_hidden, engine.config.hidden_size)

    @property
    def num_cached(self) -> int:
        return len(self.prompt.token_ids) + len(self.tokens) - 1

    def row(self) -> DecodeRow[TieredSequence]:
        return DecodeRow(self.sequence, self.tokens[-1], self.num_cached, self.hidden, Sampling())

    def kv(self, pools: TierPools) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of all layers, and index pages of all owners, as bytes."""
        num_pages = -(-self.num_cached // BLOCK_TOKENS)
        pages = pools.host_rows.unflatten(1, (-1, BLOCK_TOKENS))[:, self.blocks[:num_pages]]
        return (
            pages.flatten(1, 2)[:, : self.num_cached].clone(),
            pools.index_pages[:, self.blocks[:num_pages]].clone(),
        )

    def _import(self, pools: TierPools) -> None:
        """What a handoff does, without one."""
        source = self.prompt.source.pool
        host_pages = pools.host_rows.unflatten(1, (-1, BLOCK_TOKENS))
        for page in range(len(source.rows)):
            host_pages[:, self.blocks[page]] = source.rows[page]
            pools.index_pages[:, self.blocks[page]] = source.index_pages[page]


@dataclass(frozen=True)
class Decoded:
    """What a batch left behind."""

    tokens: list[list[int]]
    hidden: list[torch.Tensor]
    kv: list[tuple[torch.Tensor, torch.Tensor]]  # of each sequence
    num_misses: int


@cache
def decoded(kv_format: str, residency: str, batch: tuple[int, ...] = (0, 1, 2)) -> Decoded:
    """These prompts in one batch, NUM_NEW tokens each."""
    # 23 device pages: all 20 fit, but leave less than `mixed` wants free.
    device_pool_mib = {"fp32": 24, "fp8_ds_mla": 7}[kv_format] * -(-len(batch) // 3)
    with open_decode_engine(settings(kv_format, residency, device_pool_mib)) as engine:
        running = [
            Running(engine, prompts(kv_format)[number], range(12 * place, 12 * place + 12))
            for place, number in enumerate(batch)
        ]
        for _ in range(NUM_NEW - 1):
            outputs = engine.step([sequence.row() for sequence in running])
            for sequence, output in zip(running, outputs, strict=True):
                sequence.tokens.append(output.token_id)
                sequence.hidden = output.hidden
        result = Decoded(
            tokens=[sequence.tokens for sequence in running],
            hidden=[sequence.hidden for sequence in running],
            kv=[sequence.kv(engine.tier.pools) for sequence in running],
            num_misses=sum(counters.misses for counters in engine.tier.counters),
        )
        for sequence in running:
            engine.tier.close(sequence.sequence)
        engine.tier.check_integrity()
    return result


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode_gives_the_aggregated_engines_tokens_and_kv(kv_format: str, residency: str) -> None:
    """Residency changes where rows lie, never a token, nor a row of the MTP layer's KV."""
    result = decoded(kv_format, residency)

    for prompt, tokens, kv in zip(prompts(kv_format), result.tokens, result.kv, strict=True):
        assert tokens == prompt.answer
        assert_same_rows(prompt.whole, kv[0])


def assert_same_rows(whole: demo.Reference, rows: torch.Tensor) -> None:
    expected = whole.pool.rows.transpose(0, 1).flatten(1, 2)[:, : rows.shape[1]]
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("residency", ["mixed", "all-host"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_residency_changes_no_bit(kv_format: str, residency: str) -> None:
    """The same batch: rows come from elsewhere, yet every token, hidden state and byte is equal."""
    expected, result = decoded(kv_format, "all-resident"), decoded(kv_format, residency)

    assert expected.num_misses == 0 < result.num_misses
    assert result.tokens == expected.tokens
    for hidden, wanted in zip(result.hidden, expected.hidden, strict=True):
        assert torch.equal(hidden, wanted)
    for (rows, pages), (wanted_rows, wanted_pages) in zip(result.kv, expected.kv, strict=True):
        assert torch.equal(rows, wanted_rows)
        assert torch.equal(pages, wanted_pages)


@pytest.mark.parametrize("batch", [(0,), (1,), (2, 0), (2, 1, 0, 1, 2), (1, 1, 1, 0, 2, 1, 1)])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_who_decodes_beside_a_sequence_changes_no_bit_of_it(
    kv_format: str, batch: tuple[int, ...]
) -> None:
    """With FP8 a last bit moves a rounding, and in time a token: a seed would keep no promise."""
    expected, result = decoded(kv_format, "all-host"), decoded(kv_format, "all-host", batch)

    for place, number in enumerate(batch):
        assert result.tokens[place] == expected.tokens[number]
        assert torch.equal(result.hidden[place], expected.hidden[number])
        for ours, wanted in zip(result.kv[place], expected.kv[number], strict=True):
            assert torch.equal(ours, wanted)


def test_pools_too_small_for_one_page_are_refused() -> None:
    """An operator learns at the start, not at the first request."""
    with pytest.raises(ConfigError, match="too small"):
        open_decode_engine(settings("fp32", "mixed", device_pool_mib=0)).__enter__()


def test_a_hidden_state_of_another_width_is_refused() -> None:
    """A handoff from another model must not become tokens."""
    with pytest.raises(ValueError, match="3 elements"):
        hidden_from_bytes(torch.zeros(3).numpy().tobytes(), 256)
