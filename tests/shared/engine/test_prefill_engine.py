"""The engine against transformers on the bundled checkpoint, fp32 weights and fp32 KV.

Selection is real from 257 tokens on (top-k 256). With the oracle's positions injected only rounding
is left; running free, a selection may differ where two scores are as good as equal.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from shared import farspan_pb2 as pb
from shared.engine.attention import KEY_STEP, index_scores, select_positions
from shared.engine.step import Chunk, PrefillStep, Sampled, Sampling
from shared.engine.tiles import padded
from shared.logprobs import joined
from tests import demo
from tests.oracles.slow_memory import RoundedMemory
from tests.oracles.slow_quantiser import Fp32Quantiser
from tests.oracles.slow_reference import SlowReference
from tests.oracles.transformers_oracle import TransformersOracle

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 225, 226, 255, 256, 257, 511, 512, 513, 1000]
LONGEST = max(LENGTHS)
NUM_NEW = 64
# Independent fp32 implementations of this model differ by 3e-4 at 700 tokens.
LOGITS_TOLERANCE = 1e-3
SCORE_TOLERANCE = 1e-5


class OracleRun:
    """One forward of the oracle over the longest prompt: causal, so it serves every shorter one."""

    def __init__(self, scratch: Path) -> None:
        self.model = TransformersOracle(demo.CHECKPOINT, scratch)
        self.prompt = list(demo.text_tokens()[:LONGEST])
        self.logits = self.model.logits(self.prompt)
        self.chosen = {layer: chosen.clone() for layer, chosen in self.model.chosen.items()}

    def positions(self, layer: int, num_tokens: int) -> torch.Tensor:  # [n, width] ascending
        """What the oracle's indexer chose, -1 where a query has fewer positions than top-k."""
        queries = torch.arange(num_tokens)[:, None]
        chosen = self.chosen[layer][:num_tokens]
        return torch.where(chosen <= queries, chosen, -1)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> OracleRun:
    return OracleRun(tmp_path_factory.mktemp("oracle"))


class RecordingSelect:
    """select_positions, or injected positions for the target's owners; remembers what it saw."""

    def __init__(self, injected: list[torch.Tensor] | None = None) -> None:
        self.injected = injected
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, query, weights, keys, limits, first, topk) -> torch.Tensor:
        number = len(self.calls)
        if self.injected is not None and number < len(self.injected):
            chosen = self.injected[number]
        else:
            chosen = select_positions(query, weights, keys, limits, first, topk)
        self.calls.append((query, weights, keys, chosen))
        return chosen


def whole_prompt(prompt: list[int], select: RecordingSelect) -> torch.Tensor:  # [n, vocab]
    """Logits of every position, computed in one chunk."""
    reference = demo.reference(len(prompt), select=select)
    chunk = Chunk("one", np.array(prompt, np.uint32), 0, 0, reference.block_ids, Sampling())
    return demo.model().logits(reference.engine.hidden(PrefillStep((chunk,))))


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_logits_equal_transformers_on_its_own_selection(oracle: OracleRun, num_tokens: int) -> None:
    """With selection out of the way, everything else is the same arithmetic."""
    owners = [layer for layer in demo.model().config.index_layers if layer in oracle.chosen]
    injected = [oracle.positions(layer, num_tokens) for layer in owners]

    logits = whole_prompt(oracle.prompt[:num_tokens], RecordingSelect(injected))

    difference = (logits - oracle.logits[:num_tokens]).abs().max()
    assert float(difference) < LOGITS_TOLERANCE


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_greedy_tokens_equal_transformers(oracle: OracleRun, num_tokens: int) -> None:
    """64 tokens, running free, prompt in chunks of 512."""
    prompt = oracle.prompt[:num_tokens]

    tokens, _ = demo.reference(num_tokens + NUM_NEW).generate(prompt, NUM_NEW)

    assert tokens == oracle.model.greedy(prompt, NUM_NEW)


def test_selections_differ_only_between_equal_scores(oracle: OracleRun) -> None:
    """A position that only one side chose scores as well as the worst that both could choose."""
    select = RecordingSelect()
    whole_prompt(oracle.prompt, select)
    owners = [layer for layer in demo.model().config.index_layers if layer in oracle.chosen]

    for layer, (query, weights, keys, chosen) in zip(owners, select.calls, strict=False):
        theirs = oracle.positions(layer, LONGEST)
        for row in range(LONGEST):
            ours = set(chosen[row].tolist()) - {-1}
            swapped = ours ^ (set(theirs[row].tolist()) - {-1})
            if not swapped:
                continue
            one, whole = slice(row, row + 1), padded(keys, KEY_STEP)
            buffer = torch.empty(query.shape[1] * len(whole))
            scores = index_scores(query[one], weights[one], whole, buffer)[0]
            values = scores[sorted(swapped)]
            assert float(values.max() - values.min()) < SCORE_TOLERANCE, f"{layer=} {row=}"


PREFILLED = 700  # tokens: more than top-k, so that positions are chosen too


@cache
def prefilled_at_once(kv_format: str) -> tuple[demo.Reference, Sampled]:
    reference = demo.reference(PREFILLED, kv_format)
    return reference, reference.prefill(list(demo.text_tokens()[:PREFILLED]), PREFILLED, Sampling())


@pytest.mark.parametrize("kv_format", ["fp32", "fp8_ds_mla"])
@pytest.mark.parametrize(
    "ends",
    [
        range(64, 701, 64),
        range(37, 701, 37),
        range(100, 701, 100),
        [1, 2, 3, 9, 200, 333, 350],
        [*range(20, 40), *range(250, 262), 512, *range(690, 700)],
    ],
    ids=["blocks", "ragged", "hundreds", "uneven", "single tokens"],
)
def test_where_chunks_end_changes_no_bit(kv_format: str, ends: Sequence[int]) -> None:
    """Load moves the ends; neither KV nor the handed-over hidden state may show it."""
    whole, expected = prefilled_at_once(kv_format)
    prompt = list(demo.text_tokens()[:PREFILLED])
    chunked = demo.reference(PREFILLED, kv_format)

    drawn = chunked.prefill_to(prompt, [*ends, PREFILLED], Sampling())

    assert drawn == expected
    assert torch.equal(chunked.pool.rows, whole.pool.rows)
    assert torch.equal(chunked.pool.index_pages, whole.pool.index_pages)


@pytest.mark.parametrize("num_threads", [1, 3, 6])
@pytest.mark.parametrize("ends", [[601], [300, 601]], ids=["whole", "in two"])
def test_how_many_threads_compute_changes_no_bit(num_threads: int, ends: list[int]) -> None:
    """601 rows cut by three or six threads would fall inside a vector (silu, exp)."""
    prompt = list(demo.text_tokens()[:601])
    found, expected = demo.reference(601, "fp8_ds_mla"), demo.reference(601, "fp8_ds_mla")
    with demo.threads(2):
        wanted = expected.prefill(prompt, 601, Sampling())

    with demo.threads(num_threads):
        drawn = found.prefill_to(prompt, ends, Sampling())

    assert drawn == wanted
    assert torch.equal(found.pool.rows, expected.pool.rows)
    assert torch.equal(found.pool.index_pages, expected.pool.index_pages)


@pytest.mark.parametrize("kv_format", ["fp32", "fp8_ds_mla"])
def test_who_is_prefilled_beside_a_prompt_changes_no_bit(kv_format: str) -> None:
    """Three prompts' chunks in one step give what each gives alone."""
    prompts = [list(demo.text_tokens()[part]) for part in (slice(0, 300), slice(9), slice(7, 471))]
    beside = demo.reference(300 + 64 + 512, kv_format)
    blocks = [range(0, 5), range(5, 6), range(6, 14)]
    step = PrefillStep(
        tuple(
            Chunk(str(number), np.array(prompt, np.uint32), 0, 0, tuple(own), Sampling())
            for number, (prompt, own) in enumerate(zip(prompts, blocks, strict=True))
        )
    )

    drawn = beside.engine.run(step).sampled

    for number, (prompt, own) in enumerate(zip(prompts, blocks, strict=True)):
        alone = demo.reference(len(prompt), kv_format)
        assert alone.prefill(prompt, 512, Sampling()) == drawn[str(number)]
        assert torch.equal(alone.pool.rows, beside.pool.rows[own.start : own.stop])
        assert torch.equal(alone.pool.index_pages, beside.pool.index_pages[own.start : own.stop])


def test_a_step_without_chunks_only_records_generations() -> None:
    """A block that was handed out anew is known as such before anything is written to it."""
    reference = demo.reference(64)

    result = reference.engine.run(PrefillStep((), generations=((0, 7),)))

    assert result.sampled == {}
    assert reference.pool.generations.tolist() == [1, 7]


def test_steps_that_differ_have_different_digests() -> None:
    """Ranks compare digests; a difference must show."""
    chunk = Chunk("a", np.arange(3, dtype=np.uint32), 0, 0, (0,))
    other = Chunk("a", np.arange(3, dtype=np.uint32), 0, 0, (1,))

    assert PrefillStep((chunk,)).digest() != PrefillStep((other,)).digest()
    assert PrefillStep((chunk,)).digest() == PrefillStep((chunk,)).digest()


def told_prompt(ids: list[int], ends: list[int], num_top: int) -> pb.TokenLogprobs:
    """A prompt's logprobs, computed in chunks that end where told."""
    source, parts, done = demo.reference(len(ids)), [], 0
    for end in ends:
        first = max(done - 1, 0)
        part = np.array(ids[first:end], np.uint32)
        chunk = Chunk("r", part, first, done - first, source.block_ids, None, num_top)
        parts += source.engine.run(PrefillStep((chunk,))).prompt_logprobs.values()
        done = end
    return joined(parts)


def test_a_prompt_s_logprobs_are_the_slow_reference_s_however_it_is_cut() -> None:
    """Those of all tokens but the first; a chunk of one token has none to tell."""
    ids = list(demo.text_tokens()[:90])
    slow = SlowReference(demo.CHECKPOINT, RoundedMemory(Fp32Quantiser()))
    exact = torch.log_softmax(slow.logits(slow.extend(ids).hidden), -1)

    told = told_prompt(ids, [90], 4)

    chosen = np.frombuffer(told.chosen, "<f4")
    wanted = exact[torch.arange(89), ids[1:]].numpy()
    assert np.abs(chosen - wanted).max() < 1e-4
    top = np.frombuffer(told.top_logprobs, "<f4").reshape(89, 4)
    assert np.abs(top - exact[:89].topk(4).values.numpy()).max() < 1e-4
    assert told == told_prompt(ids, [64, 90], 4)
    assert told == told_prompt(ids, [1, 64, 65, 90], 4)
