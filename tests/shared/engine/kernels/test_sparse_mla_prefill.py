"""Sparse MLA prefill against its meaning: on a GPU compiled, else in Triton's interpreter.

Tolerances: inputs are unit normals, so an output element is a mean of normals and at most about 4;
its bf16 rounding is 2**-9 of it, or 2**-8 where the interpreter cuts off instead; probabilities are
rounded likewise before the second product. The logarithm is fp32 throughout.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.reference import sparse_prefill as reference
from shared.engine.kernels.sparse_mla_prefill import sparse_mla_prefill
from tests.shared.engine.kernels.offline import MAX_SHARED_BYTES, Build, compile_for_hopper

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATENT, VALUE = 576, 512
SCALE = 1 / 16
NUM_ROWS = 96
ROUNDING = 2e-2
LOGARITHM = 2e-3


def _case(
    num_queries: int, heads: int, topk: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(num_queries, heads, LATENT, generator=random).bfloat16()
    rows = torch.randn(NUM_ROWS, LATENT, generator=random).bfloat16()
    chosen = torch.randint(NUM_ROWS, (num_queries, topk), generator=random, dtype=torch.int32)
    return query.to(DEVICE), rows.to(DEVICE), chosen.to(DEVICE)


def _assert_means_the_same(
    query: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, scale: float = SCALE
) -> None:
    out, lse = sparse_mla_prefill(query, rows, chosen, scale)

    wanted, wanted_lse = reference.sparse_mla_prefill(query, rows, chosen, VALUE, scale)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), wanted, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(lse, wanted_lse, rtol=LOGARITHM, atol=LOGARITHM)


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize(
    "topk",
    [
        pytest.param(1, id="one-place"),
        pytest.param(37, id="less-than-a-block"),
        pytest.param(64, id="one-block"),
        pytest.param(130, id="two-blocks-and-a-tail"),
    ],
)
def test_every_head_count_and_tail_means_the_same(heads: int, topk: int) -> None:
    query, rows, chosen = _case(2, heads, topk)

    _assert_means_the_same(query, rows, chosen)


def test_missing_places_may_stand_anywhere() -> None:
    query, rows, chosen = _case(4, 16, 150)
    chosen[0, ::3] = -1
    chosen[1, :70] = -1  # a whole block before the first row
    chosen[2, 5:] = -1
    chosen[3, :-1] = -1

    _assert_means_the_same(query, rows, chosen)


@pytest.mark.parametrize("heads", [8, 64])
def test_a_query_without_rows_gets_zeros_and_minus_infinity(heads: int) -> None:
    query, rows, chosen = _case(3, heads, 70)
    chosen[1] = -1

    out, lse = sparse_mla_prefill(query, rows, chosen, SCALE)

    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full_like(lse[1], -torch.inf))
    assert lse[[0, 2]].isfinite().all()


def test_what_is_not_chosen_is_not_read_into_the_result() -> None:
    """Scratch rows that nobody wrote may hold anything."""
    query, rows, chosen = _case(2, 16, 70)
    chosen[chosen == 0] = 1
    chosen[:, ::2] = -1
    rows[0] = torch.nan

    out, lse = sparse_mla_prefill(query, rows, chosen, SCALE)

    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize(("num_queries", "topk"), [(0, 64), (2, 0), (0, 0)])
def test_no_queries_or_no_places_give_empty_results(num_queries: int, topk: int) -> None:
    query, rows, chosen = _case(num_queries, 16, topk)

    out, lse = sparse_mla_prefill(query, rows, chosen, SCALE)

    assert out.shape == (num_queries, 16, VALUE) and not out.any()
    assert lse.shape == (num_queries, 16) and (lse == -torch.inf).all()


def test_equal_scores_share_equally() -> None:
    query, rows, chosen = _case(1, 16, 100)
    rows[:] = rows[0]

    out, lse = sparse_mla_prefill(query, rows, chosen, SCALE)

    torch.testing.assert_close(
        out[0].float(), rows[0, :VALUE].float().expand(16, -1), rtol=ROUNDING, atol=ROUNDING
    )
    one = reference.sparse_mla_prefill(query, rows, chosen[:, :1], VALUE, SCALE)[1]
    torch.testing.assert_close(lse, one + math.log(100), rtol=LOGARITHM, atol=LOGARITHM)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    """Scores of some thousands, ascending and descending, and all far below zero."""
    query, rows, chosen = _case(3, 16, 128)
    rows[:, VALUE:] = 0
    rows[:, 0] = torch.arange(NUM_ROWS, device=DEVICE)
    query[:, :, VALUE:] = 0
    query[:, :, 0] = torch.tensor([500.0, -500.0, -900.0], device=DEVICE)[:, None]
    chosen[:, :NUM_ROWS] = torch.arange(NUM_ROWS, device=DEVICE, dtype=torch.int32)
    chosen[2] = 5

    _assert_means_the_same(query, rows, chosen)


@settings(max_examples=12, deadline=None)
@given(
    num_queries=st.integers(1, 3),
    heads=st.sampled_from([8, 16]),
    live=st.lists(st.booleans(), min_size=1, max_size=80),
    seed=st.integers(0, 99),
)
def test_a_missing_place_is_as_if_it_were_not_there(
    num_queries: int, heads: int, live: list[bool], seed: int
) -> None:
    """Whatever lies between, the rows that are chosen give the result."""
    query, rows, chosen = _case(num_queries, heads, len(live), seed)
    is_live = torch.tensor(live, device=DEVICE)
    masked = torch.where(is_live, chosen, -1)

    out, lse = sparse_mla_prefill(query, rows, masked, SCALE)
    bare, bare_lse = sparse_mla_prefill(query, rows, chosen[:, is_live].contiguous(), SCALE)

    torch.testing.assert_close(out.float(), bare.float(), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(lse, bare_lse, rtol=LOGARITHM, atol=LOGARITHM)


def test_a_query_has_the_same_bits_in_any_company() -> None:
    query, rows, chosen = _case(3, 16, 70)

    together, together_lse = sparse_mla_prefill(query, rows, chosen, SCALE)
    alone, alone_lse = sparse_mla_prefill(query[1:2], rows, chosen[1:2], SCALE)

    assert torch.equal(together[1:2], alone) and torch.equal(together_lse[1:2], alone_lse)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"query": torch.zeros(2, 12, LATENT).bfloat16()}, "12 heads", id="heads"),
        pytest.param({"query": torch.zeros(2, 16, LATENT)}, "query is torch.float32", id="type"),
        pytest.param({"query": torch.zeros(2, 16, 512).bfloat16()}, "576", id="latent-size"),
        pytest.param({"rows": torch.zeros(9, 640).bfloat16()}, "rows are", id="row-size"),
        pytest.param({"chosen": torch.zeros(2, 4).long()}, "int32", id="index-type"),
        pytest.param({"chosen": torch.zeros(3, 4).int()}, r"\[2, topk\]", id="query-count"),
        pytest.param(
            {"rows": torch.zeros(LATENT, 9).bfloat16().T}, "contiguous", id="not-contiguous"
        ),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(
    change: dict[str, torch.Tensor], words: str
) -> None:
    query, rows, chosen = _case(2, 16, 4)
    arguments = {"query": query, "rows": rows, "chosen": chosen}
    arguments |= {name: tensor.to(DEVICE) for name, tensor in change.items()}

    with pytest.raises(ValueError, match=words):
        sparse_mla_prefill(**arguments, scale=SCALE)


def test_the_kernel_for_any_head_count_compiles_for_hopper() -> None:
    signature = {
        "query": "*bf16",
        "rows": "*bf16",
        "chosen": "*i32",
        "out": "*bf16",
        "lse": "*fp32",
        "scale": "fp32",
        "topk": "i32",
    }
    builds = [
        Build(
            "shared.engine.kernels.sparse_mla_prefill:_attend",
            signature,
            {
                "HEADS": heads,
                "PADDED_HEADS": max(heads, 16),
                "VALUE": VALUE,
                "ROPE": LATENT - VALUE,
                "BLOCK": 64,
                "IN_FP32": False,
            },
            {"num_warps": 8 if heads > 16 else 4, "num_stages": 2},
        )
        for heads in (8, 32)
    ]

    for compiled in compile_for_hopper(builds):
        assert compiled.spilled_bytes == 0
        assert compiled.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("topk", [1, 130, 2048])
def test_every_compiled_kernel_means_the_same(heads: int, topk: int) -> None:
    query, rows, chosen = _case(20, heads, topk)
    chosen[1, ::3] = -1
    chosen[2, topk // 2 :] = -1
    chosen[3] = -1

    _assert_means_the_same(query, rows, chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
def test_rows_and_queries_past_two_to_the_31_elements_are_found(heads: int) -> None:
    num_rows = 2**31 // LATENT + 70  # 4.3 GB
    rows = torch.zeros(num_rows, LATENT, dtype=torch.bfloat16, device="cuda")
    rows[-100:] = torch.randn(100, LATENT, device="cuda").bfloat16()
    query = torch.randn(1, heads, LATENT, device="cuda").bfloat16()
    chosen = (num_rows - 1 - torch.arange(90, device="cuda", dtype=torch.int32))[None]
    query = query.expand(2**31 // (heads * VALUE) + 3, -1, -1).contiguous()
    chosen = chosen.expand(len(query), -1).contiguous()

    out, lse = sparse_mla_prefill(query, rows, chosen, SCALE)

    wanted, wanted_lse = reference.sparse_mla_prefill(query[:1], rows, chosen[:1], VALUE, SCALE)
    for number in (0, len(query) - 1):
        torch.testing.assert_close(out[number].float(), wanted[0], rtol=ROUNDING, atol=ROUNDING)
        torch.testing.assert_close(lse[number], wanted_lse[0], rtol=LOGARITHM, atol=LOGARITHM)
