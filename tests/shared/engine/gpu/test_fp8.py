"""Matrices that stay block-FP8 multiply as their dequantised values do."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.gpu.fp8 import Fp8Dense, fp8_matrix, joined
from shared.engine.model.weights import StoredWeight
from shared.errors import ConfigError
from tests.shared.engine.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """What is not written must not count."""
    with pytest.MonkeyPatch.context() as patch:
        poison_new_memory(patch)
        yield


def stored(height: int, inner: int, seed: int = 1) -> StoredWeight:
    """Its scales differ from block to block."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randn(height, inner, generator=random).mul(50).to(torch.float8_e4m3fn)
    blocks = (-(-height // 128), -(-inner // 128))
    return StoredWeight(codes, torch.rand(blocks, generator=random) * 0.01 + 0.005)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_close(made: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the result's rounding to bf16, and the tensor cores' sums of FP8 products."""
    torch.testing.assert_close(
        made.float().cpu(), expected, rtol=2**-7, atol=1e-3 * float(expected.abs().max())
    )


@given(height=st.integers(1, 300), inner=st.integers(1, 300), num_rows=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_any_matrix_multiplies_as_its_values(height: int, inner: int, num_rows: int) -> None:
    """Also where its last blocks are short, as those of kv_a_proj are."""
    weight, rows = stored(height, inner), normal(num_rows, inner, seed=2)

    made = Fp8Dense(fp8_matrix(weight, DEVICE))(rows.to(DEVICE))

    assert_close(made, rows.float() @ weight.dense().T)


@pytest.mark.parametrize("inner", [128, 200])
def test_joined_halves_stay_apart(inner: int) -> None:
    """Where they end within a block, the second one begins at the next."""
    gate, up, rows = stored(inner, 256), stored(inner, 256, seed=3), normal(4, 256, seed=2)

    made = Fp8Dense(joined(fp8_matrix(gate, DEVICE), fp8_matrix(up, DEVICE)))(rows.to(DEVICE))

    halves = made.chunk(2, -1)
    for half, weight in zip(halves, (gate, up), strict=True):
        assert_close(half[:, :inner], rows.float() @ weight.dense().T)
        assert not half[:, inner:].any()


def test_a_matrix_without_scales_is_refused() -> None:
    with pytest.raises(ValueError, match="scales"):
        fp8_matrix(StoredWeight(torch.ones(2, 2)), DEVICE)


def test_a_matrix_with_nan_is_refused() -> None:
    """The device would take it for a number."""
    weight = stored(130, 130)
    weight.values.view(torch.uint8)[129, 129] = 0xFF
    with pytest.raises(ConfigError, match="130 x 130"):
        fp8_matrix(weight, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 16, 64, 100, 1000])
def test_any_number_of_rows_is_multiplied(num_rows: int) -> None:
    """In tiles of few rows and of many, and without the device being waited for."""
    weight, rows = stored(576, 2048), normal(num_rows, 2048, seed=2)
    product, on_device = Fp8Dense(fp8_matrix(weight, DEVICE)), rows.to(DEVICE)
    product(on_device)

    torch.cuda.set_sync_debug_mode("error")
    try:
        made = product(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert_close(made, rows.float() @ weight.dense().T)
