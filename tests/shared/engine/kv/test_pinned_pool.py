"""The host pool is plain memory to the CPU, and pinned while its block lasts."""

import pytest
import torch

from shared.engine.kv.pinned_pool import pinned_pool


def test_the_pool_is_zero_and_has_the_size_asked_for() -> None:
    """Any number of bytes, also less than a page."""
    for num_bytes in (1, 656, 3 * 2**20 + 5):
        with pinned_pool(num_bytes) as pool:
            assert pool.shape == (num_bytes,)
            assert pool.dtype == torch.uint8
            assert not pool.any()


def test_tensors_on_the_pool_outlive_the_block() -> None:
    """The block unpins; the memory goes with its last tensor."""
    with pinned_pool(656 * 4) as pool:
        rows = pool.view(4, 656)
        rows[2] = 7

    assert rows[2].eq(7).all()


@pytest.mark.gpu
def test_the_pool_is_pinned_inside_the_block_only() -> None:
    """Also when the block is left by an exception."""
    with pytest.raises(RuntimeError, match="stop"), pinned_pool(2**22) as pool:
        assert pool.is_pinned()
        raise RuntimeError("stop")

    assert not pool.is_pinned()
