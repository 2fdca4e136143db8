"""Which tensors a rank reads: everything shared, and of the routed experts only its own."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.comm import RankGroup
from shared.engine.model.backend import CpuBackend
from shared.engine.model.config import load_config
from shared.engine.model.loading import load_weights
from shared.engine.model.moe import MoeWeights, expert_range
from shared.errors import ConfigError
from tests import demo

CONFIG = load_config(demo.CHECKPOINT)
NUM_EXPERTS = CONFIG.moe.num_experts


def expert_of(name: str) -> int | None:
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


@pytest.fixture(scope="module")
def by_expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint with a shard for each expert, so that reading one shows."""
    directory = tmp_path_factory.mktemp("by_expert")
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for source in sorted(demo.CHECKPOINT.glob("*.safetensors")):
        for name, tensor in load_file(source).items():
            expert = expert_of(name)
            shard = "common" if expert is None else f"expert-{expert}"
            shards.setdefault(f"{shard}.safetensors", {})[name] = tensor
    for shard, tensors in shards.items():
        save_file(tensors, directory / shard)
    table = {name: shard for shard, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return directory


def only_experts(source: Path, directory: Path, experts: range) -> Path:
    """The checkpoint without the shards of the other experts."""
    kept = ["common.safetensors", *(f"expert-{e}.safetensors" for e in experts)]
    for name in (*kept, "model.safetensors.index.json"):
        (directory / name).symlink_to(source / name)
    return directory


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_rank_needs_no_other_ranks_experts(by_expert: Path, tmp_path: Path, size: int) -> None:
    """Routed experts are 97 % of a 755 GB file: a rank that reads all of them starts late."""
    for rank in range(size):
        group = RankGroup(rank, size)
        experts = expert_range(NUM_EXPERTS, group)
        place = tmp_path / str(rank)
        place.mkdir()
        directory = only_experts(by_expert, place, experts)

        weights = load_weights(directory, CONFIG, group, CpuBackend())

        for layer in (*weights.layers, weights.mtp.layer):
            if isinstance(layer.feed_forward, MoeWeights):
                assert list(layer.feed_forward.experts.by_id) == list(experts)


def test_a_rank_without_its_expert_says_so(by_expert: Path, tmp_path: Path) -> None:
    """So the test above proves something."""
    directory = only_experts(by_expert, tmp_path, range(3))

    with pytest.raises(ConfigError, match=r"experts\.3\..*expert-3"):
        load_weights(directory, CONFIG, RankGroup(0, 2), CpuBackend())


def test_the_sharded_copy_is_the_same_model(by_expert: Path) -> None:
    """Names decide, not files."""
    ours = load_weights(by_expert, CONFIG, RankGroup(), CpuBackend())

    theirs = demo.model().weights
    assert torch.equal(ours.head.weight, theirs.head.weight)
    last, expected = ours.mtp.layer.feed_forward, theirs.mtp.layer.feed_forward
    assert isinstance(last, MoeWeights) and isinstance(expected, MoeWeights)
    assert torch.equal(
        last.experts.by_id[7].gate_up.weight, expected.experts.by_id[7].gate_up.weight
    )


def test_the_router_stays_fp32(by_expert: Path) -> None:
    """A rounded score changes the choice of experts, whatever type the rest computes in."""
    weights = load_weights(by_expert, CONFIG, RankGroup(), CpuBackend(torch.bfloat16))

    assert weights.head.weight.dtype == torch.bfloat16
    moe = weights.layers[1].feed_forward
    assert isinstance(moe, MoeWeights)
    assert moe.router.weight.dtype == moe.correction_bias.dtype == torch.float32
    assert moe.shared_expert.down.weight.dtype == torch.bfloat16


def test_layers_that_reuse_a_selection_have_no_indexer() -> None:
    """The checkpoint holds no such tensors, and nothing asks for them."""
    layers = demo.model().weights.layers

    owners = [i for i, layer in enumerate(layers) if layer.attention.indexer is not None]
    assert owners == [0, 1, 2]
    assert demo.model().weights.mtp.layer.attention.indexer is not None
