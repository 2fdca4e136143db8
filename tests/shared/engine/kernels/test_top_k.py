"""The best columns of each row: exact for any scores, equal ones to the lower column.

The kernel needs a GPU; here its meaning is compared with a plain sort and with the CPU engine.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.experimental.gluon import language as gl

from shared.engine.attention import best_positions
from shared.engine.kernels.reference import indexing as reference
from shared.engine.kernels.top_k import top_k
from tests.shared.engine.kernels.offline import MAX_SHARED_BYTES, Build, compile_for_hopper

K = 2048
NUM_COLUMNS = 40_960  # long enough that a threshold is estimated from a sample
INF, NAN = float("inf"), float("nan")


def generator(seed: int, device: str = "cuda") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def lengths_of(values: list[int], device: str = "cuda") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_as_meant(
    scores: torch.Tensor, lengths: torch.Tensor, k: int = K, first: int = 0
) -> None:
    assert torch.equal(top_k(scores, lengths, k, first), reference.top_k(scores, lengths, k, first))


def naive_choice(scores: list[float], k: int) -> list[int]:
    def rank(column: int) -> tuple[bool, float, int]:
        score = scores[column]
        return (score != score, 0.0 if score != score else -score, column)

    best = sorted(sorted(range(len(scores)), key=rank)[:k])
    return best + [-1] * (k - len(best))


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, INF, -INF, NAN]), max_size=20),
        min_size=1,
        max_size=4,
    ),
    k=st.integers(1, 24),
)
@settings(deadline=None)
def test_its_meaning_is_a_stable_sort_with_numbers_first(rows: list[list[float]], k: int) -> None:
    scores = torch.full((len(rows), 20), 9.0)
    for row, values in enumerate(rows):
        scores[row, : len(values)] = torch.tensor(values)

    chosen = reference.top_k(scores, lengths_of([len(row) for row in rows], "cpu"), k)

    assert chosen.tolist() == [naive_choice(row, k) for row in rows]


def test_its_meaning_is_what_the_cpu_engine_chooses() -> None:
    """The engine's scores begin at position 0, the kernel's at the first that may be chosen."""
    scores = torch.randint(-3, 4, (6, 50), generator=generator(0, "cpu")).float()
    limits, first = torch.tensor([0, 1, 7, 20, 48, 49]), 1

    chosen = reference.top_k(scores[:, first:], (limits + 1 - first).int(), 9, first)

    assert torch.equal(chosen.long(), best_positions(scores, limits, first, 9))


def test_it_compiles_for_hopper() -> None:
    signature = {
        "tiles_of_scores": f"tensordesc<fp32[256, 16],{gl.NVMMASharedLayout(64, 32, 2)!r}>",
        "scores": "*fp32",
        "lengths": "*i32",
        "chosen": "*i32",
        "scratch": "*i32",
        "num_rows": "i32",
        "num_columns": "i32",
        "row_stride": "i32",
        "first": "i32",
    }
    options = {"num_warps": 8, "maxnreg": 80}
    kernel = "shared.engine.kernels.top_k:_top_k"
    build = Build(kernel, signature, {"K": K}, options, ["num_columns", "row_stride"])

    (compiled,) = compile_for_hopper([build])

    assert compiled.shared_bytes <= MAX_SHARED_BYTES // 3  # three blocks a processor


BAD_CALLS = [
    pytest.param(torch.zeros(2, 32, dtype=torch.float64), 2, 8, "scores", id="fp64-scores"),
    pytest.param(torch.zeros(2, 40), 2, 8, "16", id="columns-no-multiple-of-16"),
    pytest.param(torch.zeros(2, 64)[:, 1:33], 2, 8, "aligned", id="rows-that-begin-askew"),
    pytest.param(torch.zeros(2, 32), 3, 8, "lengths", id="a-length-too-many"),
    pytest.param(torch.zeros(2, 32), 2, 2049, "2049", id="more-than-2048"),
    pytest.param(torch.zeros(2, 32), 2, 0, "0", id="none"),
]


@pytest.mark.parametrize(("scores", "num_lengths", "k", "words"), BAD_CALLS)
def test_unsuitable_input_is_refused(
    scores: torch.Tensor, num_lengths: int, k: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        top_k(scores, lengths_of([0] * num_lengths, "cpu"), k)


def test_no_rows_are_no_work() -> None:
    assert top_k(torch.zeros(0, 32), lengths_of([], "cpu"), 8).shape == (0, 8)


def evenly_random(scores: torch.Tensor) -> None:
    scores.normal_(generator=generator(1))


def all_equal(scores: torch.Tensor) -> None:
    scores.fill_(0.25)


def few_values(scores: torch.Tensor) -> None:
    scores.copy_(torch.randint(0, 3, scores.shape, generator=generator(2), device="cuda"))


def mostly_zero(scores: torch.Tensor) -> None:
    """What ReLU leaves: fewer positive scores than places, the rest exactly zero."""
    scores.normal_(generator=generator(3)).sub_(2.0).relu_()


def signed_zeros(scores: torch.Tensor) -> None:
    scores.copy_(torch.randint(0, 2, scores.shape, generator=generator(4), device="cuda"))
    scores.mul_(2.0).sub_(1.0).mul_(0.0)


def ascending(scores: torch.Tensor) -> None:
    """Each column beats all before it: the worst for a threshold that only rises."""
    scores.copy_(torch.arange(scores.shape[1], device="cuda").expand_as(scores))


def descending(scores: torch.Tensor) -> None:
    scores.copy_(-torch.arange(scores.shape[1], device="cuda").expand_as(scores))


def best_at_the_end(scores: torch.Tensor) -> None:
    scores.normal_(generator=generator(5))
    scores[:, -3000:] += 10


def hidden_from_the_sample(scores: torch.Tensor) -> None:
    """Large where a regular sample looks, small elsewhere: the estimate is far too high."""
    scores.normal_(generator=generator(6))
    scores.view(len(scores), -1, 160)[:, :, :8] += 100


def infinities(scores: torch.Tensor) -> None:
    scores.normal_(generator=generator(7))
    scores[:, ::3], scores[:, 1::3] = INF, -INF


def only_a_few_are_finite(scores: torch.Tensor) -> None:
    scores.fill_(-INF)
    scores[:, 100:1100].normal_(generator=generator(8))


def half_are_not_numbers(scores: torch.Tensor) -> None:
    scores.normal_(generator=generator(9))
    scores[:, ::2] = NAN


def none_is_a_number(scores: torch.Tensor) -> None:
    scores.fill_(NAN)


FILLS = [
    evenly_random,
    all_equal,
    few_values,
    mostly_zero,
    signed_zeros,
    ascending,
    descending,
    best_at_the_end,
    hidden_from_the_sample,
    infinities,
    only_a_few_are_finite,
    half_are_not_numbers,
    none_is_a_number,
]


@pytest.mark.gpu
@pytest.mark.parametrize("k", [2048, 256, 100])
@pytest.mark.parametrize("fill", FILLS)
def test_the_best_are_chosen(fill: Callable[[torch.Tensor], None], k: int) -> None:
    scores = torch.empty(4, NUM_COLUMNS, device="cuda")
    fill(scores)

    assert_as_meant(scores, lengths_of([NUM_COLUMNS, NUM_COLUMNS - 1, 20_001, 9000]), k)


@pytest.mark.gpu
def test_rows_of_any_length_are_padded_with_minus_one() -> None:
    lengths = [0, 1, 7, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 12_289, NUM_COLUMNS]
    scores = torch.randn(len(lengths), NUM_COLUMNS, device="cuda", generator=generator(0))

    assert_as_meant(scores, lengths_of(lengths))


@pytest.mark.gpu
def test_what_stands_behind_a_row_s_length_is_not_read() -> None:
    scores = torch.randn(3, NUM_COLUMNS, device="cuda", generator=generator(0))
    lengths = lengths_of([100, 3000, 30_000])
    expected = top_k(scores, lengths, K)
    for row, length in enumerate(lengths.tolist()):
        scores[row, length:] = INF

    assert torch.equal(top_k(scores, lengths, K), expected)


@pytest.mark.gpu
def test_positions_may_begin_later_than_columns() -> None:
    scores = torch.randn(3, 4096, device="cuda", generator=generator(0))

    assert_as_meant(scores, lengths_of([5, 2500, 4096]), first=1)


@pytest.mark.gpu
def test_rows_may_be_part_of_wider_ones() -> None:
    scores = torch.randn(5, 8192, device="cuda", generator=generator(0))[:, 64:6064]

    assert_as_meant(scores, lengths_of([6000, 5999, 3000, 2000, 1]))


@pytest.mark.gpu
def test_a_row_s_choice_does_not_depend_on_the_others() -> None:
    """More rows than are worked on at once, alike and alone."""
    row = torch.randn(1, 16_384, device="cuda", generator=generator(0))
    alone = top_k(row, lengths_of([16_000]), K)

    together = top_k(row.repeat(1500, 1), lengths_of([16_000] * 1500), K)

    assert torch.equal(together, alone.expand_as(together))


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_read() -> None:
    """A million columns, and the last row behind 2**31 elements."""
    scores = torch.randn(2050, 1 << 20, device="cuda", generator=generator(0))
    lengths = lengths_of([1 << 20] * 2050)
    lengths[-2:] = (1 << 20) - 5

    chosen = top_k(scores, lengths, K)

    rows = [0, 1024, 2048, 2049]
    assert torch.equal(chosen[rows], reference.top_k(scores[rows], lengths[rows], K))


@pytest.mark.gpu
def test_the_host_waits_for_nothing() -> None:
    scores = torch.randn(3, 4096, device="cuda")
    lengths = lengths_of([4096] * 3)
    top_k(scores, lengths, K)

    torch.cuda.set_sync_debug_mode("error")
    try:
        top_k(scores, lengths, K)
    finally:
        torch.cuda.set_sync_debug_mode("default")
