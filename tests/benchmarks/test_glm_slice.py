"""The slice of GLM-5.3, made small: it is a checkpoint as released ones are, and it computes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from benchmarks import glm_slice
from shared.engine.attention_ops import CpuAttentionOps
from shared.engine.comm import RankGroup
from shared.engine.gpu.backend import GpuBackend
from shared.engine.kv.format import make_format
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding
from shared.engine.kv.pool import BlockPool
from shared.engine.model.backend import Backend, CpuBackend
from shared.engine.model.config import load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.transformer import Transformer
from shared.engine.model.weights import dequantise_blocks
from shared.engine.prefill_engine import PrefillEngine
from shared.engine.prefill_kv import KvContext
from shared.engine.step import Chunk, PrefillStep
from tests import demo
from tests.layer_comparison import TOLERANCE, Comparison, compare, load, load_reference

SMALL = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_topk": 64,
}
# The bundled model's layers of the same kinds, for those of the slice and its MTP layer.
ALIKE = {0: 0, 1: 1, 2: 3, 3: 6}
NUM_TOKENS = 200


def written(folder: Path, seed: int) -> Path:
    glm_slice.write(folder, SMALL, seed, torch.device("cpu"))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("slice"), seed=1)


def types(checkpoint: Path, layer: int) -> dict[str, str]:
    """Of the layer's tensors, those of the first experts among them."""
    table = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    found, prefix = {}, f"model.layers.{layer}."
    for name, shard in table.items():
        own = name.removeprefix(prefix)
        is_later_expert = own.startswith("mlp.experts.") and int(own.split(".")[2]) >= 4
        if name.startswith(prefix) and not is_later_expert:
            with safe_open(checkpoint / shard, "pt") as file:
                found[own] = file.get_slice(name).get_dtype()
    return found


@pytest.mark.parametrize("layer", ALIKE)
def test_names_and_types_are_those_of_a_released_file(checkpoint: Path, layer: int) -> None:
    assert types(checkpoint, layer) == types(demo.CHECKPOINT, ALIKE[layer])


def test_one_seed_gives_one_set_of_bytes(checkpoint: Path, tmp_path: Path) -> None:
    again, other = written(tmp_path / "again", seed=1), written(tmp_path / "other", seed=2)

    for path in checkpoint.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    shard = "model-00001-of-00008.safetensors"
    assert (other / shard).read_bytes() != (checkpoint / shard).read_bytes()


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_a_quantised_block_keeps_three_bits_of_its_values(
    rows: int, columns: int, seed: int
) -> None:
    """Whatever is left over at the ends."""
    matrix = torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed))

    values, scale_inv = glm_slice.quantise_blocks(matrix)

    assert values.float().abs().max() == 448.0
    error = (dequantise_blocks(values, scale_inv) - matrix).abs()
    # Half a step of a normal number, or of the smallest there is.
    assert bool((error <= (matrix.abs() / 16).clamp_min(scale_inv.max() * 2**-10) * 1.001).all())


def test_hidden_states_neither_die_nor_explode(checkpoint: Path) -> None:
    config, group = load_config(checkpoint), RankGroup()
    sizes = []

    class Measured(Transformer):
        def layer(self, *args: object, **kwargs: object) -> torch.Tensor:
            hidden = super().layer(*args, **kwargs)
            sizes.append(float(hidden.square().mean().sqrt()))
            return hidden

    kv_format, num_blocks = make_format("fp8_ds_mla", config.attention), -(-NUM_TOKENS // 64)
    context = KvContext(
        BlockPool(config, kv_format, num_blocks, epoch=1),
        CpuAttentionOps(kv_format, config.attention),
        config.attention.kv_lora_rank,
        Sharding(1, BLOCK_TOKENS),
        group,
    )
    model = Measured(config, load_weights(checkpoint, config, group, CpuBackend()), group)
    ids = torch.randint(
        config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)
    )
    chunk = Chunk("text", ids.numpy().astype("uint32"), 0, 0, tuple(range(num_blocks)))
    hidden = PrefillEngine(model, context).hidden(PrefillStep((chunk,)))

    assert bool(hidden.isfinite().all())
    assert len(sizes) == 3 and all(0.5 < size < 5.0 for size in sizes), sizes


def compared(checkpoint: Path, backend: Backend) -> list[Comparison]:
    config = load_config(checkpoint)
    ids = np.random.default_rng(0).integers(config.vocab_size, size=NUM_TOKENS, dtype=np.uint32)
    ours = load(checkpoint, backend, CpuAttentionOps, NUM_TOKENS)
    ours.run(ids, 150)
    return list(compare(ours, load_reference(checkpoint, NUM_TOKENS), ids).values())


def test_nothing_differs_where_nothing_is_rounded(checkpoint: Path) -> None:
    """So what the comparison finds on a GPU is the GPU's."""
    for seen in compared(checkpoint, CpuBackend()):
        assert max(seen.rows, seen.attended, seen.added, seen.expert_outputs) < 1e-5
        assert seen.same_positions == seen.same_experts == 1.0


def test_products_that_stay_in_fp8_make_hardly_a_difference(checkpoint: Path) -> None:
    """The GPU's backend, on the CPU."""
    for seen in compared(checkpoint, GpuBackend(torch.device("cpu"), torch.float32)):
        assert seen.rows < TOLERANCE.rows / 2
        assert seen.attended < TOLERANCE.attended / 2
        assert seen.added < TOLERANCE.added / 2
        assert seen.expert_outputs < TOLERANCE.expert_outputs / 2
