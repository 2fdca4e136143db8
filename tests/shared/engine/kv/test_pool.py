"""The prefill pool: what is written to a slot is read from it, and from nowhere else."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kv.format import KvFormat, make_format
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.kv.pool import BlockPool
from shared.engine.model.config import load_config
from shared.engine.step import BlockCopy
from tests import demo

CONFIG = load_config(demo.CHECKPOINT)
NUM_BLOCKS = 5
INDEX_LAYER = CONFIG.index_layers[-1]


def made(name: str) -> tuple[BlockPool, KvFormat]:
    kv_format = make_format(name, CONFIG.attention)
    return BlockPool(CONFIG, kv_format, NUM_BLOCKS, epoch=11), kv_format


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("name", ["fp32", "fp8_ds_mla"])
def test_a_block_is_two_contiguous_extents(name: str) -> None:
    """A handoff takes two descriptors a block: all layers' rows, all owners' index pages."""
    pool, kv_format = made(name)

    assert pool.rows[0].is_contiguous() and pool.index_pages[0].is_contiguous()
    assert pool.rows[0].numel() == 7 * BLOCK_TOKENS * kv_format.row_bytes
    key_bytes = kv_format.key_value_bytes + kv_format.key_scale_bytes
    assert pool.index_pages[0].numel() == 4 * BLOCK_TOKENS * key_bytes


@given(st.lists(st.integers(0, NUM_BLOCKS * BLOCK_TOKENS - 1), unique=True, max_size=80))
@settings(deadline=None, max_examples=20)
def test_rows_and_keys_come_back_from_the_slots_they_went_to(slots: list[int]) -> None:
    """In any order, in one layer; every other byte of the pool keeps its value."""
    pool, kv_format = made("fp8_ds_mla")
    places = torch.tensor(slots, dtype=torch.int64)
    rows = noise(len(slots), kv_format.row_bytes)
    keys = noise(len(slots), kv_format.key_value_bytes + kv_format.key_scale_bytes)

    pool.write_rows(INDEX_LAYER, places, rows)
    pool.write_keys(INDEX_LAYER, places, keys)

    blocks = torch.arange(NUM_BLOCKS)
    assert torch.equal(pool.read_rows(INDEX_LAYER, blocks)[places], rows)
    assert torch.equal(pool.read_keys(INDEX_LAYER, blocks)[places], keys)
    assert int(torch.count_nonzero(pool.rows)) == rows.numel()
    assert int(torch.count_nonzero(pool.index_pages)) == keys.numel()


def test_blocks_are_read_in_the_order_asked() -> None:
    """A sequence's blocks lie anywhere in the pool."""
    pool, kv_format = made("fp32")
    rows = noise(NUM_BLOCKS * BLOCK_TOKENS, kv_format.row_bytes)
    pool.write_rows(3, torch.arange(NUM_BLOCKS * BLOCK_TOKENS), rows)

    read = pool.read_rows(3, torch.tensor([4, 0]))

    assert torch.equal(read, torch.cat((rows[4 * BLOCK_TOKENS :], rows[:BLOCK_TOKENS])))


def test_a_copied_block_is_equal_in_all_layers() -> None:
    """A prefix hit ends inside an effective block: its holder needs a copy of its own."""
    pool, _ = made("fp8_ds_mla")
    pool.rows[:] = noise(*pool.rows.shape)
    pool.index_pages[:] = noise(*pool.index_pages.shape)
    rows, pages = pool.rows.clone(), pool.index_pages.clone()

    pool.copy_blocks([BlockCopy(1, 3), BlockCopy(0, 4)])

    order = [0, 1, 2, 1, 0]
    assert torch.equal(pool.rows, rows[order])
    assert torch.equal(pool.index_pages, pages[order])


def test_the_generation_table_begins_with_the_epoch() -> None:
    """Decode reads it as it lies: word 0 the worker's life, word 1 + b block b's generation."""
    pool, _ = made("fp32")

    pool.set_generations([(0, 5), (4, 2**40), (0, 6)])

    assert pool.generations.dtype == torch.int64
    assert pool.generations.tolist() == [11, 6, 0, 0, 0, 2**40]


def test_only_owners_of_an_indexer_have_index_pages() -> None:
    """The released model has 22 of 79; a page for each layer would waste three quarters."""
    pool, kv_format = made("fp32")
    keys = noise(1, kv_format.key_value_bytes)

    assert pool.index_pages.shape[1] == len(CONFIG.index_layers) < CONFIG.num_kv_layers
    with pytest.raises(KeyError):
        pool.write_keys(3, torch.tensor([0]), keys)


def test_sizes_follow_the_config() -> None:
    """No dimension is a constant."""
    owners = (True,) * (CONFIG.num_layers + 1)
    config = replace(CONFIG, owns_indexer=owners)

    pool = BlockPool(config, make_format("fp32", config.attention), 2, epoch=1)

    assert pool.index_pages.shape[:2] == (2, CONFIG.num_layers + 1)
