"""On a device: the kernels encode, choose and attend as the CPU engine does."""

import pytest
import torch

from shared.engine.attention_ops import CpuAttentionOps
from shared.engine.gpu.attention_ops import GpuAttentionOps
from shared.engine.kv.format import make_format
from shared.engine.model.config import load_config
from tests import demo

pytestmark = pytest.mark.gpu

CONFIG = load_config(demo.CHECKPOINT)
ATTENTION = CONFIG.attention
FORMAT = make_format("fp8_ds_mla", ATTENTION)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_keys", [100, 257, 1000, 2049])
@pytest.mark.parametrize("first", [0, 1])
def test_the_same_positions_are_chosen(num_keys: int, first: int) -> None:
    """But for scores that FP8 products cannot tell apart."""
    cpu, gpu = CpuAttentionOps(FORMAT, ATTENTION), GpuAttentionOps(FORMAT, ATTENTION)
    query = normal(70, ATTENTION.index_heads, ATTENTION.index_dim, seed=1)
    weights, records = (
        normal(70, ATTENTION.index_heads, seed=2),
        cpu.encode_keys(normal(num_keys, 128, seed=3)),
    )
    limits = torch.arange(num_keys - 70, num_keys)

    expected = cpu.choose(query, weights, records, limits, first)
    chosen = gpu.choose(query.cuda(), weights.cuda(), records.cuda(), limits.cuda(), first).cpu()

    for ours, theirs, limit in zip(
        chosen.tolist(), expected.tolist(), limits.tolist(), strict=True
    ):
        mine, other = set(ours) - {-1}, set(theirs) - {-1}
        assert len(mine) == len(other) and all(first <= position <= limit for position in mine)
        assert len(mine & other) >= 0.99 * len(other)


def test_rows_are_encoded_to_the_same_bytes() -> None:
    latent, keys = (
        normal(200, ATTENTION.latent_dim, seed=4),
        normal(200, ATTENTION.index_dim, seed=5),
    )
    cpu, gpu = CpuAttentionOps(FORMAT, ATTENTION), GpuAttentionOps(FORMAT, ATTENTION)

    assert torch.equal(gpu.encode_rows(latent.cuda()).cpu(), cpu.encode_rows(latent))
    assert torch.equal(gpu.encode_keys(keys.cuda()).cpu(), cpu.encode_keys(keys))


@pytest.mark.parametrize("num_rows", [40, 64, 500])
def test_attention_is_the_cpus_up_to_bf16(num_rows: int) -> None:
    """With the same positions given to both."""
    cpu, gpu = CpuAttentionOps(FORMAT, ATTENTION), GpuAttentionOps(FORMAT, ATTENTION)
    rows = cpu.encode_rows(normal(num_rows, ATTENTION.latent_dim, seed=6))
    query = normal(30, ATTENTION.num_heads, ATTENTION.latent_dim, seed=7).bfloat16()
    chosen = torch.randint(-1, num_rows, (30, ATTENTION.index_topk))

    expected = cpu.attend(query.float(), rows, chosen)
    out = gpu.attend(query.cuda(), rows.cuda(), chosen.int().cuda()).float().cpu()

    assert float((out - expected).norm() / expected.norm()) < 0.01
