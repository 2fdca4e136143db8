"""The GPU's products are those of the CPU, up to the type's rounding."""

import pytest
import torch

from shared.engine.comm import RankGroup
from shared.engine.gpu.backend import GpuBackend
from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.model.backend import CpuBackend
from shared.engine.model.config import load_config
from shared.engine.model.layers import mlp
from shared.engine.model.loading import load_weights
from shared.engine.model.weights import StoredWeight
from tests import demo

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_quantised", [True, False])
def test_a_matrix_multiplies_as_it_is_stored(is_quantised: bool) -> None:
    """Quantised or not."""
    weight = StoredWeight(normal(192, 160, seed=1).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5)
    rows = normal(5, 160, seed=2).bfloat16()
    chosen = weight if is_quantised else StoredWeight(weight.dense())

    product = GpuBackend(DEVICE).linear(chosen)(rows.to(DEVICE)).float().cpu()

    expected = rows.float() @ weight.dense().T
    assert float((product - expected).norm() / expected.norm()) < 0.005


@pytest.mark.parametrize("is_quantised", [True, False])
def test_a_gated_mlp_has_any_inner_width(is_quantised: bool) -> None:
    """Gate and up are one matrix, whose halves may end within a block."""
    gate, up, down = (
        StoredWeight(normal(*shape, seed=1).to(torch.float8_e4m3fn), torch.rand(blocks))
        for shape, blocks in (((200, 64), (2, 1)), ((200, 64), (2, 1)), ((64, 200), (1, 2)))
    )
    if not is_quantised:
        gate, up, down = (StoredWeight(weight.dense()) for weight in (gate, up, down))
    hidden = normal(5, 64, seed=2).bfloat16()

    made = mlp(GpuBackend(DEVICE).mlp(gate, up, down), hidden.to(DEVICE)).float().cpu()

    expected = mlp(CpuBackend().mlp(gate, up, down), hidden.float())
    assert float((made - expected).norm() / expected.norm()) < 0.02


def test_heads_multiply_each_by_its_own_matrix() -> None:
    weights, rows = normal(3, 8, 6, seed=3), normal(5, 3, 6, seed=4)
    out = torch.empty((5, 3, 8), device=DEVICE)
    expected = torch.empty((5, 3, 8))

    GpuBackend(DEVICE, torch.float32).heads(weights)(rows.to(DEVICE), out)
    CpuBackend().heads(weights)(rows, expected)

    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_gives_the_same_matrices_on_either_backend() -> None:
    """Names, order of the joined halves, and which expert is which."""
    config = load_config(demo.CHECKPOINT)
    ours = load_weights(
        demo.CHECKPOINT, config, RankGroup(1, 2), GpuBackend(DEVICE, torch.bfloat16)
    )
    theirs = demo.model().weights
    rows = normal(BLOCK_TOKENS, config.hidden_size, seed=5)
    on_device = rows.to(DEVICE, torch.bfloat16)

    head = ours.head(on_device).float().cpu()
    torch.testing.assert_close(head, theirs.head(rows), rtol=0.02, atol=0.1)
    layer, expected = ours.layers[1].feed_forward, theirs.layers[1].feed_forward
    choice = torch.tensor([[5, 2], [6, 7]] * 32)
    routed = layer.experts(on_device, choice.to(DEVICE)).float().cpu()
    whole = expected.experts(rows, choice)
    whole[choice < config.moe.num_experts // 2] = 0.0  # the other rank's
    # bf16 keeps 8 bits: 0.4 % a rounding, three of them one after another.
    assert float((routed - whole).norm() / whole.norm()) < 0.02
    assert not routed[choice < config.moe.num_experts // 2].any()
