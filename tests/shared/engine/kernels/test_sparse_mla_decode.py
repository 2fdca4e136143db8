"""Attention over selected rows of two pools: plan and contract here, the kernel on a GPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.kernels.reference import sparse_decode as reference
from shared.engine.kernels.sparse_mla_decode import plan_splits, sparse_mla_decode
from shared.engine.kernels.sparse_mla_decode_hopper import REGISTERS, WARPS
from tests.shared.engine.kernels.offline import MAX_SHARED_BYTES, Build, compile_for_hopper

SCALE = 1 / 16
# Rounding of probabilities (fp16) and of the result (bf16), against the largest value.
TOLERANCE = 2**-8
LSE_TOLERANCE = {"atol": 2e-4, "rtol": 1e-5}


@dataclass(frozen=True)
class Call:
    """What one call attends with."""

    query: torch.Tensor
    rows: torch.Tensor
    row_ids: torch.Tensor
    hot_rows: torch.Tensor | None = None

    def run(self, num_splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_mla_decode(
            self.query,
            self.rows,
            self.row_ids,
            SCALE,
            hot_rows=self.hot_rows,
            num_splits=num_splits,
        )

    def meaning(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.sparse_mla_decode(
            self.query, self.rows, self.row_ids, SCALE, self.hot_rows
        )


def stored_rows(seed: int, num_rows: int, device: str = "cuda") -> torch.Tensor:
    """Rows whose groups differ in magnitude by up to 2**12, and the fifth of them all zero."""
    generator = torch.Generator(device).manual_seed(seed)
    values = 100 * torch.randn((num_rows, 4, 128), generator=generator, device=device)
    exponents = torch.randint(-14, -2, (num_rows, 4, 1), generator=generator, device=device)
    rope = 2 * torch.randn((num_rows, 64), generator=generator, device=device)
    if num_rows > 4:
        values[4], rope[4] = 0, 0
    parts = (
        values.clamp(-448, 448).to(torch.float8_e4m3fn),
        torch.exp2(exponents.float()),
        rope.bfloat16(),
    )
    return torch.cat([part.flatten(1).view(torch.uint8) for part in parts], 1)


def make_call(
    num_queries: int = 3,
    num_heads: int = 64,
    top_k: int = 2048,
    *,
    num_rows: int = 3000,
    num_hot_rows: int = 0,
    seed: int = 0,
) -> Call:
    """Distinct rows where there are enough of them; heads differ in magnitude by up to 2**8."""
    generator = torch.Generator("cuda").manual_seed(seed)
    query = torch.randn((num_queries, num_heads, 576), generator=generator, device="cuda")
    exponents = torch.randint(
        -6, 3, (num_queries, num_heads, 1), generator=generator, device="cuda"
    )
    weights = torch.rand((num_queries, num_rows + num_hot_rows), generator=generator, device="cuda")
    return Call(
        (query * torch.exp2(exponents.float())).bfloat16(),
        stored_rows(seed + 1, num_rows),
        weights.topk(top_k, -1).indices.int(),
        stored_rows(seed + 2, num_hot_rows) if num_hot_rows else None,
    )


def assert_as_meant(call: Call, num_splits: int | None = None) -> None:
    out, lse = call.run(num_splits)
    expected, expected_lse = call.meaning()
    torch.testing.assert_close(lse, expected_lse, **LSE_TOLERANCE)
    largest = expected.abs().amax(-1, keepdim=True)
    assert bool(((out.float() - expected).abs() <= TOLERANCE * largest).all())


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@given(
    num_queries=st.integers(1, 1024),
    top_k=st.integers(1, 4096),
    num_processors=st.integers(1, 132),
)
def test_splits_cover_all_places_and_none_is_idle(
    num_queries: int, top_k: int, num_processors: int
) -> None:
    num_splits = plan_splits(num_queries, top_k, num_processors)

    num_tiles = -(-top_k // 64)
    tiles_a_split = -(-num_tiles // num_splits)
    assert num_splits * tiles_a_split >= num_tiles
    assert (num_splits - 1) * tiles_a_split < num_tiles


@pytest.mark.parametrize(("num_queries", "fewest"), [(1, 16), (8, 16), (64, 2)])
def test_small_batches_occupy_most_processors(num_queries: int, fewest: int) -> None:
    assert plan_splits(num_queries, 2048, 132) >= fewest


def test_large_batches_are_not_split() -> None:
    assert plan_splits(256, 2048, 132) == 1


def test_it_compiles_for_hopper_with_room_for_all_warps() -> None:
    signature = {
        "query": "*bf16",
        "rows": "*fp8e4nv",
        "hot_rows": "*fp8e4nv",
        "first_hot": "i32",
        "row_ids": "*i32",
        "lse": "*fp32",
        "scale_log2": "fp32",
        "top_k": "i32",
        "span": "i32",
        "num_splits": "i32",
    }
    kernel = "shared.engine.kernels.sparse_mla_decode_hopper:attend"
    options = {"num_warps": WARPS, "maxnreg": REGISTERS}

    builds = [
        Build(kernel, signature | {"out": out}, {"NUM_HEADS": heads, "WIDTH": 2048}, options)
        for heads, out in ((64, "*fp32"), (8, "*bf16"))
    ]

    for compiled in compile_for_hopper(builds):
        assert compiled.registers * 3 * WARPS * 32 <= 2**16
        # Before the loop a query's values are held at once; inside it nothing spills.
        assert compiled.spilled_bytes <= 32
        assert compiled.shared_bytes <= MAX_SHARED_BYTES


BAD_CALLS = [
    pytest.param({"query": (2, 7, 576)}, "heads", id="heads-that-no-share-has"),
    pytest.param({"query": (2, 64, 512)}, "query must be", id="query-without-rope"),
    pytest.param({"rows": (4, 640)}, "rows must be", id="rows-of-another-format"),
    pytest.param({"hot_rows": (4, 640)}, "hot_rows must be", id="hot-rows-of-another-format"),
    pytest.param({"row_ids": (3, 16)}, "row_ids must be", id="row-ids-of-other-queries"),
]


@pytest.mark.parametrize(("shapes", "words"), BAD_CALLS)
def test_unsuitable_shapes_are_refused(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    chosen = {"query": (2, 64, 576), "rows": (4, 656), "hot_rows": (4, 656), "row_ids": (2, 16)}
    chosen |= shapes

    with pytest.raises(ValueError, match=words):
        sparse_mla_decode(
            torch.zeros(chosen["query"], dtype=torch.bfloat16),
            torch.zeros(chosen["rows"], dtype=torch.uint8),
            torch.zeros(chosen["row_ids"], dtype=torch.int32),
            SCALE,
            hot_rows=torch.zeros(chosen["hot_rows"], dtype=torch.uint8),
        )


def test_a_query_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="query must be"):
        sparse_mla_decode(
            torch.zeros(2, 64, 576),
            torch.zeros(4, 656, dtype=torch.uint8),
            torch.zeros(2, 16, dtype=torch.int32),
            SCALE,
        )


def test_more_splits_than_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="splits"):
        sparse_mla_decode(
            torch.zeros(2, 64, 576, dtype=torch.bfloat16),
            torch.zeros(4, 656, dtype=torch.uint8),
            torch.zeros(2, 128, dtype=torch.int32),
            SCALE,
            num_splits=3,
        )


def test_no_queries_are_no_work() -> None:
    out, lse = sparse_mla_decode(
        torch.zeros(0, 16, 576, dtype=torch.bfloat16),
        torch.zeros(4, 656, dtype=torch.uint8),
        torch.zeros(0, 2048, dtype=torch.int32),
        SCALE,
    )

    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [64, 32, 16, 8])
@pytest.mark.parametrize("num_splits", [1, 2, 16])
def test_selected_rows_are_attended(num_heads: int, num_splits: int) -> None:
    assert_as_meant(make_call(num_heads=num_heads), num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 63, 64, 65, 100, 1000, 2047])
def test_any_number_of_places_is_attended(top_k: int) -> None:
    assert_as_meant(make_call(top_k=top_k))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_places_without_a_row_count_for_nothing(num_splits: int) -> None:
    call = make_call(num_queries=4)
    is_none = torch.rand(call.row_ids.shape, device="cuda") < 0.4
    is_none[2, :1100] = True  # a whole split of it
    call.row_ids[is_none] = -1

    assert_as_meant(call, num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_short_context_ends_in_places_without_a_row(num_splits: int) -> None:
    call = make_call(num_queries=6)
    for query, num_places in enumerate([2048, 1, 64, 65, 700, 1024]):
        call.row_ids[query, num_places:] = -1

    assert_as_meant(call, num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_query_without_rows_gets_zeros(num_splits: int) -> None:
    call = make_call()
    call.row_ids[1] = -1

    out, lse = call.run(num_splits)

    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full_like(lse[1], -math.inf))
    assert_as_meant(call, num_splits)


@pytest.mark.gpu
def test_rows_behind_the_resident_ones_are_hot_rows() -> None:
    assert_as_meant(make_call(num_rows=1500, num_hot_rows=1000))


@pytest.mark.gpu
def test_one_pool_cut_in_two_gives_the_same_bits() -> None:
    whole = make_call()
    # The second part lies at another address.
    cut = Call(whole.query, whole.rows[:1000], whole.row_ids, whole.rows[1000:].clone())

    for of_whole, of_cut in zip(whole.run(), cut.run(), strict=True):
        assert torch.equal(of_whole, of_cut)


@pytest.mark.gpu
def test_bytes_that_are_no_numbers_do_no_harm_where_nobody_selects_them() -> None:
    call = make_call()
    call.row_ids[call.row_ids == 0] = -1
    call.rows[0] = 0xFF

    assert_as_meant(call)


@pytest.mark.gpu
def test_the_same_row_many_times_over_is_its_value() -> None:
    call = make_call()
    call.row_ids[:] = 7

    out, _ = call.run()

    value = reference.decode_rows(call.rows[7])[:512]
    torch.testing.assert_close(out.float(), value.expand_as(out), rtol=2**-8, atol=0)


@pytest.mark.gpu
def test_queries_far_outside_half_precision_are_attended() -> None:
    call = make_call()
    call.query[0] *= 2.0**30  # one row takes all
    call.query[1] *= 2.0**-30

    assert_as_meant(call)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8])
def test_a_row_beyond_half_precision_never_gives_a_finite_result(num_splits: int) -> None:
    call = make_call()
    call.rows[5, :128] = 0x7E  # 448
    call.rows[5, 512:516].view(torch.float32).fill_(2.0**10)
    call.row_ids[call.row_ids == 5] = -1
    call.row_ids[1, 100] = 5

    out, _ = call.run(num_splits)

    assert not bool(out[1].isfinite().all(-1).any())
    assert bool(out[[0, 2]].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_query_does_not_depend_on_its_neighbours(num_splits: int) -> None:
    together = make_call(num_queries=20)
    alone = Call(together.query[7:8], together.rows, together.row_ids[7:8])

    for of_batch, of_one in zip(together.run(num_splits), alone.run(num_splits), strict=True):
        assert torch.equal(of_batch[7:8], of_one)


@pytest.mark.gpu
def test_equal_calls_give_equal_bits() -> None:
    call = make_call(num_queries=200)

    for first, second in zip(call.run(), call.run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
def test_rows_and_queries_beyond_two_to_the_31_elements_are_found() -> None:
    num_queries, num_rows = 2**31 // (64 * 512) + 3, 2**31 // 656 + 100
    few = make_call(num_queries=2, top_k=64)
    rows = torch.zeros(num_rows, 656, dtype=torch.uint8, device="cuda")
    rows[-3000:] = few.rows
    query = torch.zeros(num_queries, 64, 576, dtype=torch.bfloat16, device="cuda")
    query[-2:] = few.query
    row_ids = torch.full((num_queries, 64), -1, dtype=torch.int32, device="cuda")
    row_ids[-2:] = few.row_ids + (num_rows - 3000)

    out, lse = sparse_mla_decode(query, rows, row_ids, SCALE)

    for found, expected in zip((out, lse), few.run(num_splits=1), strict=True):
        assert torch.equal(found[-2:], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_queries", [8, 140])
def test_a_captured_step_replays_with_other_contents(num_queries: int) -> None:
    call, later = (
        make_call(num_queries=num_queries, num_rows=1500, num_hot_rows=900, seed=seed)
        for seed in (0, 10)
    )
    later.row_ids[1] = -1
    later.row_ids[2, 500:] = -1
    expected = later.run()
    graph = torch.cuda.CUDAGraph()
    call.run()  # compiles
    with torch.cuda.graph(graph):
        replayed = call.run()

    with no_host_waits():
        for name in ("query", "rows", "row_ids", "hot_rows"):
            getattr(call, name).copy_(getattr(later, name))
        graph.replay()

    for of_replay, of_eager in zip(replayed, expected, strict=True):
        assert torch.equal(of_replay, of_eager)


@pytest.mark.gpu
def test_a_call_never_waits_for_the_device() -> None:
    call = make_call()
    call.run()

    with no_host_waits():
        call.run()
