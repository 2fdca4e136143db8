"""Merging parts of an attention, against the whole and against its meaning in PyTorch."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.combine_splits import combine_splits
from shared.engine.kernels.reference import sparse_decode as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One step of bf16: the interpreter cuts off where the device rounds.
TOLERANCE = {"atol": 1e-30, "rtol": 2**-7}
# The interpreter is numpy, which warns of what a GPU computes in silence.
NOT_A_NUMBER = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def combined(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result, in memory that was NaN."""
    num_queries, _, num_heads = lses.shape
    out = torch.full((num_queries, num_heads, 512), math.nan, device=DEVICE).bfloat16()
    lse = torch.full((num_queries, num_heads), math.nan, device=DEVICE)
    combine_splits(outputs, lses, out, lse)
    return out, lse


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 33, 64])
def test_parts_are_weighted_by_the_exponential_of_their_logarithm(num_splits: int) -> None:
    outputs, lses = normal(0, 2, num_splits, 8, 512).abs(), 4 * normal(1, 2, num_splits, 8)

    out, lse = combined(outputs, lses)

    expected, expected_lse = reference.combine_splits(outputs, lses)
    torch.testing.assert_close(out.float(), expected, **TOLERANCE)
    torch.testing.assert_close(lse, expected_lse)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    bounds=st.lists(st.integers(0, 24), max_size=4).map(sorted),
)
def test_the_parts_of_an_attention_combine_to_the_whole(seed: int, bounds: list[int]) -> None:
    scores, values = normal(seed, 2, 24), normal(seed + 1, 24, 512).abs()
    edges = [0, *bounds, 24]
    parts = [(scores[:, a:b], values[a:b]) for a, b in pairwise(edges)]
    lses = torch.stack([torch.logsumexp(s, -1) for s, _ in parts])
    outputs = torch.stack([torch.softmax(s, -1) @ v for s, v in parts])

    out, lse = combined(outputs.unsqueeze(0), lses.unsqueeze(0))

    torch.testing.assert_close(
        out[0].float(), torch.softmax(scores, -1) @ values, rtol=2**-6, atol=0
    )
    torch.testing.assert_close(lse[0], torch.logsumexp(scores, -1))


def test_the_output_of_an_empty_part_is_not_read() -> None:
    outputs, lses = normal(0, 1, 4, 2, 512).abs(), normal(1, 1, 4, 2)
    outputs[:, 1], lses[:, 1] = math.nan, -math.inf

    out, lse = combined(outputs, lses)

    kept = [0, 2, 3]
    expected, expected_lse = reference.combine_splits(outputs[:, kept], lses[:, kept])
    torch.testing.assert_close(out.float(), expected, **TOLERANCE)
    torch.testing.assert_close(lse, expected_lse)


@NOT_A_NUMBER
def test_a_query_whose_parts_are_all_empty_gets_zeros() -> None:
    out, lse = combined(
        torch.full((1, 3, 2, 512), math.nan, device=DEVICE),
        torch.full((1, 3, 2), -math.inf, device=DEVICE),
    )

    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_logarithms_far_apart_neither_overflow_nor_vanish() -> None:
    outputs = normal(0, 1, 3, 1, 512).abs()
    lses = torch.tensor([[[-900.0], [800.0], [799.0]]], device=DEVICE)

    out, lse = combined(outputs, lses)

    expected, expected_lse = reference.combine_splits(outputs, lses)
    torch.testing.assert_close(out.float(), expected, **TOLERANCE)
    torch.testing.assert_close(lse, expected_lse)


@NOT_A_NUMBER
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_part_that_is_no_number_spoils_its_query_and_head(number: float) -> None:
    outputs, lses = normal(0, 2, 3, 2, 512), normal(1, 2, 3, 2)
    lses[0, 1, 1] = number

    out, lse = combined(outputs, lses)

    assert bool(out[0, 1].isnan().all()) and bool(lse[0, 1].isnan())
    assert int(out.isnan().sum()) == 512 and int(lse.isnan().sum()) == 1


def test_a_query_does_not_depend_on_its_neighbours() -> None:
    outputs, lses = normal(0, 3, 5, 2, 512), normal(1, 3, 5, 2)

    together = combined(outputs, lses)
    alone = combined(outputs[1:2].contiguous(), lses[1:2].contiguous())

    assert torch.equal(together[0][1:2], alone[0])
    assert torch.equal(together[1][1:2], alone[1])


def test_no_queries_are_no_work() -> None:
    out, lse = combined(
        torch.empty(0, 2, 8, 512, device=DEVICE), torch.empty(0, 2, 8, device=DEVICE)
    )

    assert out.shape == (0, 8, 512) and lse.shape == (0, 8)


@pytest.mark.parametrize("num_splits", [0, 65])
def test_a_number_of_splits_that_no_program_holds_is_refused(num_splits: int) -> None:
    with pytest.raises(ValueError, match="splits"):
        combined(
            torch.empty(1, num_splits, 8, 512, device=DEVICE),
            torch.empty(1, num_splits, 8, device=DEVICE),
        )


def test_half_precision_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="outputs must be"):
        combined(
            torch.empty(1, 2, 8, 512, device=DEVICE).half(), torch.empty(1, 2, 8, device=DEVICE)
        )


@pytest.mark.gpu
def test_parts_beyond_two_to_the_31_elements_are_found() -> None:
    num_queries, num_splits = 2**31 // (64 * 64 * 512) + 2, 64
    outputs = torch.empty(num_queries, num_splits, 64, 512, device=DEVICE)
    lses = torch.full((num_queries, num_splits, 64), -math.inf, device=DEVICE)
    outputs[-1, -1], lses[-1, -1] = normal(0, 64, 512).abs(), 0.0

    out, lse = combined(outputs, lses)

    torch.testing.assert_close(out[-1].float(), outputs[-1, -1], **TOLERANCE)
    assert torch.equal(lse[-1], torch.zeros(64, device=DEVICE))
