"""The whole model, MTP layer included, against the slow reference: bytes, selections, tokens.

The engine's own bytes, rounded queries and selections are put in the reference's place once they
are compared. So each value is judged alone: a rounding that falls to the other side is one
difference, not the start of many.
"""

import inspect
import textwrap

import numpy as np
import pytest
import torch

from shared.engine.attention import select_positions
from shared.engine.attention_ops import CpuAttentionOps
from shared.engine.comm import RankGroup
from shared.engine.kv.format import make_format
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding
from shared.engine.kv.pool import BlockPool
from shared.engine.prefill_engine import PrefillEngine
from shared.engine.prefill_kv import KvContext, PrefillKv, StepLayout
from shared.engine.step import Chunk, PrefillStep
from tests import demo
from tests.oracles.slow_memory import Choice, RoundedMemory, Vector
from tests.oracles.slow_quantiser import Array, Fp8Quantiser, Fp32Quantiser, Quantiser
from tests.oracles.slow_reference import SlowReference

CONFIG = demo.model().config
QUANTISERS: dict[str, Quantiser] = {
    "fp32": Fp32Quantiser(),
    "fp8_ds_mla": Fp8Quantiser(CONFIG.attention.kv_lora_rank),
}
NUM_NEW = 32
PROMPT = 330  # past top-k (256), so that selection is real
# A value at a rounding boundary moves by an eighth, and a logit by some hundredths.
FP8_TIE = 0.05
VALUE_TOLERANCE = 1e-4  # fp32 against float64 through seven layers, values of the order of 1
SCORE_TOLERANCE = 1e-5
# Measured 5e-5: the share of values that lie as near to a rounding boundary as fp32 errors reach.
MAX_DIFFERENT_BYTES = 5e-4
LOGITS_TOLERANCE = 1e-3


class RecordingSelect:
    """select_positions that remembers what it was asked and what it answered."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        """`layers` are asked in turn, again and again."""
        self._layers = layers
        self._num_calls = 0
        self.queries: dict[tuple[int, int], torch.Tensor] = {}
        self.chosen: dict[tuple[int, int], list[int]] = {}

    def __call__(self, query, weights, keys, limits, first, topk) -> torch.Tensor:
        chosen = select_positions(query, weights, keys, limits, first, topk)
        layer = self._layers[self._num_calls % len(self._layers)]
        self._num_calls += 1
        for row, position in enumerate(limits.tolist()):
            # A token that is computed again keeps its first answer: nothing is written for it.
            self.queries.setdefault((layer, position), query[row].double())
            places = chosen[row][chosen[row] >= 0].tolist()
            self.chosen.setdefault((layer, position), places)
        return chosen


class EngineMemory:
    """Hands the reference what the engine holds, after comparing it with the reference's own."""

    def __init__(self, quantiser: Quantiser, pool: BlockPool, select: RecordingSelect) -> None:
        self._quantiser = quantiser
        self._pool = pool
        self._select = select
        self.num_bytes = 0
        self.num_different = 0

    def keep_row(self, layer: int, position: int, latent: Vector) -> Vector:
        data = self._pool.rows[position // BLOCK_TOKENS, layer, position % BLOCK_TOKENS]
        stored = data.numpy().tobytes()
        self._count(stored, self._quantiser.encode_row(latent.numpy()))
        value = self._quantiser.decode_row(stored)
        assert_rounding_of(value, latent.numpy(), self._quantiser.row_rounding(latent.numpy()))
        return torch.from_numpy(value)

    def keep_key(self, layer: int, position: int, key: Vector) -> Vector:
        ordinal, offset = CONFIG.index_layers.index(layer), position % BLOCK_TOKENS
        page = self._pool.index_pages[position // BLOCK_TOKENS, ordinal].numpy().tobytes()
        values, scale = self._quantiser.encode_key(key.numpy())
        scales = BLOCK_TOKENS * len(values)
        stored = page[offset * len(values) : (offset + 1) * len(values)]
        stored_scale = page[scales + offset * len(scale) : scales + (offset + 1) * len(scale)]
        self._count(stored + stored_scale, values + scale)
        value = self._quantiser.decode_key(stored, stored_scale)
        assert_rounding_of(value, key.numpy(), self._quantiser.key_rounding(key.numpy()))
        return torch.from_numpy(value)

    def keep_query(self, layer: int, position: int, query: torch.Tensor) -> torch.Tensor:
        engine = self._select.queries.get((layer, position))
        if engine is None:  # the engine did not run this layer's attention
            return torch.from_numpy(self._quantiser.round_query(query.numpy()))
        rounding = self._quantiser.key_rounding(query.numpy())
        assert_rounding_of(engine.numpy(), query.numpy(), rounding)
        return engine

    def choose(self, layer: int, position: int, choice: Choice) -> list[int]:
        best = choice.best()
        engine = self._select.chosen.get((layer, position), best)
        assert len(engine) == len(best)
        swapped = sorted(set(engine) ^ set(best))
        if swapped:
            scores = choice.scores[swapped]
            assert float(scores.max() - scores.min()) < SCORE_TOLERANCE, f"{layer=} {position=}"
        return engine

    def _count(self, stored: bytes, expected: bytes) -> None:
        assert len(stored) == len(expected)
        self.num_bytes += len(stored)
        different = np.frombuffer(stored, np.uint8) != np.frombuffer(expected, np.uint8)
        self.num_different += int(different.sum())


def assert_rounding_of(stored: Array, exact: Array, rounding: Array) -> None:
    """`stored` is what a value within the tolerance of `exact` may be rounded to."""
    tolerance = VALUE_TOLERANCE * np.maximum(np.abs(exact), 1.0)
    excess = np.abs(stored - exact) - rounding
    assert np.all(excess <= tolerance), f"off by {float(excess.max()):.1e} beyond its rounding"


@pytest.mark.parametrize("kv_format", ["fp32", "fp8_ds_mla"])
def test_kv_selection_and_tokens_are_the_slow_references(kv_format: str) -> None:
    """Every row and key of every layer; fp8 bytes differ only where a value was at a boundary."""
    prompt, num_tokens = list(demo.text_tokens()[:PROMPT]), PROMPT + NUM_NEW
    select = RecordingSelect(CONFIG.index_layers[:-1])
    engine = demo.reference(num_tokens, kv_format, select)
    tokens, _ = engine.generate(prompt, NUM_NEW, chunk_tokens=200)
    memory = EngineMemory(QUANTISERS[kv_format], engine.pool, select)
    slow = SlowReference(demo.CHECKPOINT, memory)

    extended = slow.extend([*prompt, *tokens[:-1]])

    expected = slow.logits(extended.hidden[PROMPT - 1 :]).argmax(1)
    assert tokens == expected.tolist()
    if kv_format == "fp8_ds_mla":
        assert memory.num_different < MAX_DIFFERENT_BYTES * memory.num_bytes


@pytest.mark.parametrize(
    ("kv_format", "tie"), [("fp32", 0.0), ("fp8_ds_mla", FP8_TIE)], ids=["fp32", "fp8_ds_mla"]
)
def test_running_free_the_slow_reference_says_the_same(kv_format: str, tie: float) -> None:
    """Its own rounding and selection throughout: after each token of the engine's it would say the
    next one too, or with FP8 one that is as good.
    """
    prompt = list(demo.text_tokens()[700 : 700 + PROMPT])
    tokens, _ = demo.reference(PROMPT + NUM_NEW, kv_format).generate(prompt, NUM_NEW)
    slow = SlowReference(demo.CHECKPOINT, RoundedMemory(QUANTISERS[kv_format]))

    logits = slow.logits(slow.extend([*prompt, *tokens[:-1]]).hidden[PROMPT - 1 :])

    behind = logits.amax(1) - logits[torch.arange(NUM_NEW), tokens]
    assert behind.max() <= tie
    assert (behind > 0).sum() <= 1


def test_the_mtp_layer_drafts_what_the_model_will_say() -> None:
    """Its hidden states are the reference's, and good: a wrongly wired layer agrees by chance only.

    The model card has 66 to 77 % on text like its training's; Python's library is such text.
    """
    text = inspect.getsource(textwrap)
    token_ids = demo.tokenizer().encode(text, add_special_tokens=False).ids[:400]
    select = RecordingSelect(CONFIG.index_layers)
    hidden, mtp_hidden, pool = whole_text(token_ids, select)
    slow = SlowReference(demo.CHECKPOINT, EngineMemory(QUANTISERS["fp32"], pool, select))

    extended = slow.extend(token_ids)

    for engine, reference in ((hidden, extended.hidden), (mtp_hidden, extended.mtp_hidden)):
        difference = demo.model().logits(engine).double() - slow.logits(reference)
        assert float(difference.abs().max()) < LOGITS_TOLERANCE
    # Row p of the MTP layer and row p of the target both speak of token p + 1.
    drafts = demo.model().logits(mtp_hidden).argmax(1)[1:]
    agreement = (drafts == demo.model().logits(hidden).argmax(1)[1:]).float().mean()
    assert float(agreement) > 0.5


@torch.inference_mode()
def whole_text(
    token_ids: list[int], select: RecordingSelect
) -> tuple[torch.Tensor, torch.Tensor, BlockPool]:
    """Hidden states of the target and of the MTP layer, computed in one chunk."""
    kv_format = make_format("fp32", CONFIG.attention)
    num_blocks = -(-len(token_ids) // BLOCK_TOKENS)
    pool = BlockPool(CONFIG, kv_format, num_blocks, epoch=1)
    sharding = Sharding(1, BLOCK_TOKENS)
    ops = CpuAttentionOps(kv_format, CONFIG.attention, select)
    context = KvContext(pool, ops, CONFIG.attention.kv_lora_rank, sharding, RankGroup())
    chunk = Chunk("text", np.array(token_ids, np.uint32), 0, 0, tuple(range(num_blocks)))
    hidden = PrefillEngine(demo.model(), context).hidden(PrefillStep((chunk,)))
    layout = StepLayout([chunk], sharding, 0)
    mtp_hidden = demo.model().forward_mtp(
        torch.tensor(token_ids),
        torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1])),
        layout.rows(-1),
        PrefillKv(layout, context, first_position=1),
    )
    return hidden, mtp_hidden, pool
