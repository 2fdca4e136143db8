"""A product's rows do not know each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.model.linear import Linear
from shared.engine.tiles import padded

# Inputs and outputs of the demo's and GLM-5.3's layers, and what no vector unit likes.
WIDTHS = [1, 7, 16, 65, 128, 256, 512, 576, 1024, 2048, 6144]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 2**30),
    num_in=st.sampled_from(WIDTHS),
    num_out=st.sampled_from(WIDTHS[:-2]),
    num_rows=st.integers(1, 70) | st.integers(500, 520),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_a_rows_bits_do_not_depend_on_the_others(
    seed: int, num_in: int, num_out: int, num_rows: int, data: st.DataObject
) -> None:
    """Any part of the rows, from one row on, wherever it stood."""
    linear, rows = Linear(normal(seed, num_out, num_in)), normal(seed + 1, num_rows, num_in)
    begin = data.draw(st.integers(0, num_rows - 1))
    end = data.draw(st.integers(begin + 1, num_rows))

    product = linear(rows)

    assert torch.equal(linear(rows[begin:end]), product[begin:end])
    torch.testing.assert_close(product, rows @ linear.weight.T, rtol=1e-4, atol=1e-3)


def test_no_row_is_left_alone_behind_many() -> None:
    linear, rows = Linear(normal(0, 7, 2048)), normal(1, 513, 2048)

    assert torch.equal(linear(rows[1:]), linear(rows)[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_survives_packing(dtype: torch.dtype) -> None:
    weight = normal(3, 300, 70).to(dtype)

    assert torch.equal(Linear(weight).weight, weight)


def test_no_row_gives_no_row() -> None:
    """A rank without queries, an expert without tokens."""
    assert Linear(normal(4, 5, 6))(torch.empty((0, 6))).shape == (0, 5)


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_padding_fills_up_with_zeros(num_rows: int, expected: int) -> None:
    rows = padded(torch.ones((num_rows, 3)), 4)

    assert rows.shape == (expected, 3)
    assert rows.sum() == 3 * num_rows
