"""Prefill's index scores: each row its own range of keys, columns outside it untouched.

The kernel needs a GPU; its meaning is compared with the CPU engine's scores.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.experimental.gluon import language as gl

from shared.engine.attention import KEY_STEP, index_scores
from shared.engine.kernels.indexer_logits import indexer_logits
from shared.engine.kernels.reference import indexing as reference
from shared.engine.kv.layout import Sharding
from tests.shared.engine.kernels.offline import MAX_SHARED_BYTES, Build, compile_for_hopper

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 32
# Hopper aligns FP8 products to the largest and keeps about 14 bits of each: against a row's
# largest score that was 2e-4 in the worst of some thousand rows.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Call:
    """What one call scores with."""

    query: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    key_scales: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    def run(self, num_columns: int) -> torch.Tensor:
        logits = self._untouched(num_columns)
        indexer_logits(
            self.query,
            self.weights,
            self.keys,
            self.key_scales,
            self.starts,
            self.ends,
            logits,
        )
        return logits

    def meaning(self, num_columns: int) -> torch.Tensor:
        logits = self._untouched(num_columns)
        reference.indexer_logits(
            self.query,
            self.weights,
            self.keys,
            self.key_scales,
            self.starts,
            self.ends,
            logits,
        )
        return logits

    def _untouched(self, num_columns: int) -> torch.Tensor:
        return torch.full((len(self.query), num_columns), torch.nan, device=self.query.device)


def make_call(ranges: list[tuple[int, int]], num_keys: int, heads: int = HEADS) -> Call:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    return Call(
        normal(len(ranges), heads, 128).to(torch.float8_e4m3fn),
        normal(len(ranges), heads),
        normal(num_keys, 128).to(torch.float8_e4m3fn),
        torch.exp2(torch.randint(-3, 3, (num_keys,), generator=generator, device=DEVICE).float()),
        torch.tensor([start for start, _ in ranges], dtype=torch.int32, device=DEVICE),
        torch.tensor([end for _, end in ranges], dtype=torch.int32, device=DEVICE),
    )


def assert_as_meant(call: Call, num_columns: int) -> None:
    scores, expected = call.run(num_columns), call.meaning(num_columns)

    assert torch.equal(scores.isnan(), expected.isnan())
    scores, expected = scores.nan_to_num(), expected.nan_to_num()
    largest = expected.abs().amax(-1, keepdim=True)
    assert bool(((scores - expected).abs() <= TOLERANCE * largest).all())


CASES = [
    pytest.param([(0, 64)] * 4, 64, id="one-tile-of-one-group"),
    pytest.param([(0, i + 1) for i in range(6)], 6, id="causal-and-a-short-group"),
    pytest.param([(0, 100 + i) for i in range(5)], 150, id="keys-behind-every-limit"),
    pytest.param([(0, 3), (0, 4), (4, 130), (4, 131), (131, 132)], 140, id="ragged-requests"),
    pytest.param([(7, 7), (0, 0), (9, 5), (70, 71)], 71, id="queries-without-keys"),
    pytest.param([(120, 190), (1, 2), (60, 61), (0, 190)], 190, id="in-no-order"),
    pytest.param([(1, 66)], 66, id="the-first-position-left-out"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("ranges", "num_keys"), CASES)
def test_each_query_scores_the_keys_of_its_range(
    ranges: list[tuple[int, int]], num_keys: int
) -> None:
    assert_as_meant(make_call(ranges, num_keys), num_keys)


@pytest.mark.gpu
def test_sixteen_heads_are_scored_too() -> None:
    assert_as_meant(make_call([(0, 70), (3, 70)], 70, heads=16), 70)


@pytest.mark.gpu
@given(
    ranges=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=9),
)
@settings(deadline=None, max_examples=40)
def test_any_ranges_can_stand_in_one_launch(ranges: list[tuple[int, int]]) -> None:
    assert_as_meant(make_call(ranges, 90), 96)


@pytest.mark.gpu
def test_columns_that_are_not_there_are_not_written() -> None:
    call = make_call([(0, 80), (10, 80), (79, 80)], 80)
    wide = torch.full((3, 64), torch.nan, device=DEVICE)
    narrow = wide[:, :32]

    indexer_logits(
        call.query, call.weights, call.keys, call.key_scales, call.starts, call.ends, narrow
    )

    assert narrow[:2].isfinite().all()
    assert wide[:, 32:].isnan().all()


@pytest.mark.gpu
def test_keys_of_several_ranks_are_scored_once_they_are_in_position_order() -> None:
    """Rank after rank, as they are gathered, they would be scored in other columns."""
    call = make_call([(0, 130)], 130)
    order = torch.from_numpy(Sharding(size=2, interleave=64).gathered_row(np.arange(130), 128))
    gathered = torch.zeros((256, 128), dtype=torch.uint8, device=DEVICE)
    gathered[order] = call.keys.view(torch.uint8)

    restored = replace(call, keys=gathered[order].view(torch.float8_e4m3fn))

    assert torch.equal(restored.run(130), call.run(130))


@pytest.mark.gpu
def test_equal_keys_have_equal_scores_wherever_they_stand() -> None:
    """Ties go to the lower position, so they must be ties in every bit."""
    call = make_call([(0, 200), (0, 200), (3, 200), (0, 150), (64, 200)], 200)
    call.keys.view(torch.uint8)[:] = call.keys.view(torch.uint8)[:1]
    call.key_scales[:] = 0.5

    scores = call.run(200)

    for row, (start, end) in enumerate(zip(call.starts.tolist(), call.ends.tolist(), strict=True)):
        assert scores[row, : end - start].unique().numel() == 1


def test_it_means_what_the_cpu_engine_scores() -> None:
    num_keys = 3 * KEY_STEP
    call = make_call([(0, num_keys), (5, 40)], num_keys)
    keys = call.keys.float() * call.key_scales[:, None]
    buffer = torch.empty(2 * HEADS * num_keys)

    scores = call.meaning(num_keys).cpu()

    expected = index_scores(call.query.float().cpu(), call.weights.cpu(), keys.cpu(), buffer)
    torch.testing.assert_close(scores[0], expected[0])
    torch.testing.assert_close(scores[1, :35], expected[1, 5:40])
    assert scores[1, 35:].isnan().all()


def test_it_compiles_for_hopper_without_spills() -> None:
    signature = {
        "query": "*fp8e4nv",
        "keys": f"tensordesc<fp8e4nv[64, 128],{gl.NVMMASharedLayout(128, 8, 2)!r}>",
        "key_scales": "*fp32",
        "weights": "*fp32",
        "starts": "*i32",
        "ends": "*i32",
        "logits": "*fp32",
        "num_queries": "i32",
        "num_columns": "i32",
        "row_stride": "i32",
    }
    kernel = "shared.engine.kernels.indexer_logits:_score"
    constants = {"TILE": 64, "STAGES": 6}
    options = {"num_warps": 4, "maxnreg": 96}

    builds = [Build(kernel, signature, constants | {"HEADS": n}, options) for n in (16, 32)]

    for compiled in compile_for_hopper(builds):
        assert compiled.spilled_bytes == 0
        assert compiled.shared_bytes <= MAX_SHARED_BYTES


def test_nothing_to_score_is_no_work() -> None:
    call = make_call([], 10)

    assert call.run(10).shape == (0, 10)


def arguments(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    chosen = {
        "query": torch.zeros(2, HEADS, 128, dtype=torch.float8_e4m3fn),
        "weights": torch.zeros(2, HEADS),
        "keys": torch.zeros(5, 128, dtype=torch.float8_e4m3fn),
        "key_scales": torch.zeros(5),
        "starts": torch.zeros(2, dtype=torch.int32),
        "ends": torch.zeros(2, dtype=torch.int32),
        "logits": torch.zeros(2, 5),
    }
    return chosen | changes


BAD_CALLS = [
    pytest.param("query", torch.zeros(2, HEADS, 128), "e4m3", id="query-in-fp32"),
    pytest.param(
        "query", torch.zeros(2, 5, 128, dtype=torch.float8_e4m3fn), "5 index heads", id="five-heads"
    ),
    pytest.param("weights", torch.zeros(2, 16), "weights", id="weights-of-other-heads"),
    pytest.param(
        "keys", torch.zeros(5, 64, dtype=torch.float8_e4m3fn), "keys", id="keys-too-short"
    ),
    pytest.param("key_scales", torch.zeros(4), "scales", id="a-scale-is-missing"),
    pytest.param("starts", torch.zeros(2, dtype=torch.int64), "starts", id="starts-in-64-bits"),
    pytest.param("ends", torch.zeros(3, dtype=torch.int32), "ends", id="one-end-too-many"),
    pytest.param("logits", torch.zeros(3, 5), "logits", id="a-row-too-many"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_CALLS)
def test_unsuitable_input_is_refused(name: str, value: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        indexer_logits(**arguments(**{name: value}))


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_scored() -> None:
    """The last rows lie behind 2**31 elements, their neighbours' columns are compared too."""
    num_keys, num_queries = 1 << 20, 2056
    call = make_call([(0, num_keys - i % 3) for i in range(num_queries)], num_keys)

    scores = call.run(num_keys)

    for row in (0, 2046, num_queries - 1):
        one = slice(row, row + 1)
        alone = replace(
            call,
            query=call.query[one],
            weights=call.weights[one],
            starts=call.starts[one],
            ends=call.ends[one],
        )
        expected = alone.meaning(num_keys)[0]
        assert torch.equal(scores[row].isnan(), expected.isnan())
        error = (scores[row] - expected).nan_to_num().abs().max()
        assert error <= TOLERANCE * expected.nan_to_num().abs().max()
