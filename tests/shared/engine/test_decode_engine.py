"""Decode through the tiers gives the aggregated engine's tokens and bytes, wherever rows lie."""

import pytest
import torch

from shared.engine.decode_engine import (
    DecodeEngine,
    DecodeEngineSettings,
    DecodeRow,
    hidden_from_bytes,
    open_decode_engine,
)
from shared.engine.kv.host_tier import TieredSequence
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.residency import ResidencyMode
from shared.engine.step import Sampling
from shared.errors import ConfigError
from tests import demo

NUM_NEW = 24


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


def import_blocks(
    engine: DecodeEngine, source: demo.Reference, num_tokens: int, blocks: list[int]
) -> None:
    """What a handoff does, without one: prompt rows to the host tier, keys to the index pages."""
    pools = engine.tier.pools
    for page in range(-(-num_tokens // BLOCK_TOKENS)):
        rows = slice(blocks[page] * BLOCK_TOKENS, (blocks[page] + 1) * BLOCK_TOKENS)
        pools.host_rows[:, rows] = source.pool.rows[page]
        pools.index_pages[:, blocks[page]] = source.pool.index_pages[page]


class Running:
    """One sequence that decodes greedily."""

    def __init__(self, engine: DecodeEngine, prompt: list[int], kv_format: str, blocks: range):
        self.reference = demo.reference(len(prompt) + NUM_NEW, kv_format)
        self.expected, first = self.reference.generate(prompt, NUM_NEW)
        self.blocks = list(blocks)
        self.sequence: TieredSequence = engine.tier.open(self.blocks)
        source = demo.reference(len(prompt), kv_format)
        source.prefill(prompt, 512, Sampling())
        import_blocks(engine, source, len(prompt), self.blocks)
        self.tokens = [first.token_id]
        self.prompt = prompt
        self.hidden = hidden_from_bytes(first.last_hidden, engine.config.hidden_size)

    def row(self) -> DecodeRow:
        position = len(self.prompt) + len(self.tokens) - 1
        return DecodeRow(self.sequence, self.tokens[-1], position, self.hidden, Sampling())


@pytest.mark.parametrize("residency", ["all-resident", "mixed", "all-host"])
@pytest.mark.parametrize("kv_format", ["fp32", "fp8_ds_mla"])
def test_decode_gives_the_aggregated_engines_tokens_and_kv(kv_format: str, residency: str) -> None:
    """Residency changes where rows lie, never a token, nor a byte of the MTP layer's KV."""
    engine = open_decode_engine(settings(kv_format, residency))
    text = demo.text_tokens()
    prompts = [list(text[:700]), list(text[900:963]), list(text[1000:1340])]
    running = [
        Running(engine, prompt, kv_format, range(20 * i, 20 * i + 12))
        for i, prompt in enumerate(prompts)
    ]

    for _ in range(NUM_NEW - 1):
        outputs = engine.step([sequence.row() for sequence in running])
        for sequence, output in zip(running, outputs, strict=True):
            sequence.tokens.append(output.token_id)
            sequence.hidden = output.hidden

    for sequence in running:
        assert sequence.tokens == sequence.expected
        assert_same_kv(engine, sequence, kv_format)
    for sequence in running:
        engine.tier.close(sequence.sequence)
    engine.tier.check_integrity()


def assert_same_kv(engine: DecodeEngine, running: Running, kv_format: str) -> None:
    num_tokens = len(running.prompt) + NUM_NEW - 1
    pages = -(-num_tokens // BLOCK_TOKENS)
    rows = torch.cat(
        [
            engine.tier.pools.host_rows[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            for block in running.blocks[:pages]
        ],
        1,
    )[:, :num_tokens]
    expected = running.reference.pool.rows[:pages].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
    decode = running.reference.kv_format.decode_rows
    # fp32: batch shape moves the rounding. fp8: a rounding may step to the next e4m3 value (1/8).
    tolerance = 1e-4 if kv_format == "fp32" else 0.13
    difference = (decode(rows) - decode(expected)).abs()
    assert float((difference / (decode(expected).abs() + 1.0)).max()) < tolerance


def test_pools_too_small_for_one_page_are_refused() -> None:
    """An operator learns at the start, not at the first request."""
    with pytest.raises(ConfigError, match="too small"):
        open_decode_engine(settings("fp32", "mixed", device_pool_mib=0))


def test_a_hidden_state_of_another_width_is_refused() -> None:
    """A handoff from another model must not become tokens."""
    with pytest.raises(ValueError, match="3 elements"):
        hidden_from_bytes(torch.zeros(3).numpy().tobytes(), 256)
