"""Reading safetensors checkpoints: both layouts, block-FP8, and files that are not whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.engine.model.weights import Checkpoint, dequantise_blocks, fingerprint
from shared.errors import ConfigError
from tests import demo
from tests.oracles.transformers_oracle import dequantised_state

KV_A = (576, 384)  # as kv_a_proj_with_mqa: the last row block is half, so [5, 3] scales


def quantised(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    return weight, torch.rand(blocks, generator=generator) + 0.5


def single_file(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def sharded(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """One shard per tensor."""
    table = {name: f"model-{i:05}.safetensors" for i, name in enumerate(tensors)}
    for name, shard in table.items():
        save_file({name: tensors[name]}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return directory


@pytest.mark.parametrize("layout", [single_file, sharded])
def test_a_tensor_is_found_in_either_layout(layout, tmp_path: Path) -> None:
    """Small checkpoints are one file, large ones an index and shards."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}

    with Checkpoint(layout(tmp_path, tensors)) as checkpoint:
        assert "a" in checkpoint and "c" not in checkpoint
        assert torch.equal(checkpoint.tensor("a", (2, 3), torch.float32), tensors["a"])
        assert checkpoint.tensor("b", (4,), torch.float32).dtype == torch.float32


@pytest.mark.parametrize("layout", [single_file, sharded])
def test_block_fp8_is_value_times_its_blocks_scale(layout, tmp_path: Path) -> None:
    """Also where the last row block is short, and where the scales lie in another shard."""
    weight, scales = quantised(KV_A)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales}

    with Checkpoint(layout(tmp_path, tensors)) as checkpoint:
        read = checkpoint.tensor("w.weight", KV_A, torch.float32)

    assert scales.shape == (5, 3)
    for row, column in ((0, 0), (127, 128), (128, 127), (511, 383), (512, 0), (575, 383)):
        expected = float(weight[row, column].float() * scales[row // 128, column // 128])
        assert float(read[row, column]) == expected


def test_the_bundled_checkpoint_reads_as_plain_loops_read_it() -> None:
    """Every tensor of it, quantised or not."""
    expected = dequantised_state(demo.CHECKPOINT)

    with Checkpoint(demo.CHECKPOINT) as checkpoint:
        for name, tensor in expected.items():
            read = checkpoint.tensor(name, tuple(tensor.shape), torch.float32)
            assert torch.equal(read, tensor), name


@pytest.mark.parametrize("scale_shape", [(4, 3), (5, 2), (3, 5)])
def test_scales_of_another_shape_are_refused(tmp_path: Path, scale_shape: tuple[int, int]) -> None:
    """Broadcasting them would give a plausible wrong weight."""
    tensors = {"w.weight": quantised(KV_A)[0], "w.weight_scale_inv": torch.ones(scale_shape)}

    with (
        Checkpoint(single_file(tmp_path, tensors)) as checkpoint,
        pytest.raises(ConfigError, match=r"w\.weight.* wants \(5, 3\) scales"),
    ):
        checkpoint.tensor("w.weight", KV_A, torch.float32)


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    """Its raw values would be off by orders of magnitude."""
    directory = single_file(tmp_path, {"w.weight": quantised(KV_A)[0]})

    with (
        Checkpoint(directory) as checkpoint,
        pytest.raises(ConfigError, match=r"w\.weight_scale_inv is missing"),
    ):
        checkpoint.tensor("w.weight", KV_A, torch.float32)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with (
        Checkpoint(single_file(tmp_path, {"a": torch.ones(1)})) as checkpoint,
        pytest.raises(ConfigError, match=r"no tensor model\.norm\.weight"),
    ):
        checkpoint.tensor("model.norm.weight", (1,), torch.float32)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    """The config belongs to another checkpoint."""
    with (
        Checkpoint(single_file(tmp_path, {"a": torch.ones(2, 3)})) as checkpoint,
        pytest.raises(ConfigError, match=r"a has shape \(2, 3\), the config wants \(3, 2\)"),
    ):
        checkpoint.tensor("a", (3, 2), torch.float32)


@pytest.mark.parametrize("kept", [0, 4, 60, 400])
def test_a_truncated_shard_is_named(tmp_path: Path, kept: int) -> None:
    """A download that broke off: in the length, in the header, in the data."""
    directory = sharded(tmp_path, {"first": torch.ones(4), "second": torch.ones(500)})
    shard = directory / "model-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])

    with Checkpoint(directory) as checkpoint:
        assert checkpoint.tensor("first", (4,), torch.float32).sum() == 4
        with pytest.raises(ConfigError, match=r"cannot read second from .*model-00001"):
            checkpoint.tensor("second", (500,), torch.float32)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = sharded(tmp_path, {"first": torch.ones(4)})
    (directory / "model-00000.safetensors").unlink()

    with (
        Checkpoint(directory) as checkpoint,
        pytest.raises(ConfigError, match=r"cannot read first from .*model-00000"),
    ):
        checkpoint.tensor("first", (4,), torch.float32)


@pytest.mark.parametrize("index", [None, "{", "{}", "[]", '{"weight_map": 3}'])
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, index: str | None) -> None:
    """Said at the start, with the directory's name."""
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(ConfigError, match=f"{tmp_path} is not a safetensors checkpoint"):
        Checkpoint(tmp_path)


def test_a_short_last_column_block_is_dequantised_too() -> None:
    """No released tensor has one; the format allows it."""
    weight, scales = quantised((130, 200))

    read = dequantise_blocks(weight, scales)

    assert float(read[129, 199]) == float(weight[129, 199].float() * scales[1, 1])


def test_a_fingerprint_changes_with_whatever_changes_kv(tmp_path: Path) -> None:
    """Workers whose KV would differ must not hand off to one another."""
    directory = single_file(tmp_path, {"a": torch.arange(4000.0)})
    config = directory / "config.json"
    config.write_text("{}")
    original = fingerprint(directory, "fp32")

    assert fingerprint(directory, "fp32") == original
    assert fingerprint(directory, "fp8_ds_mla") != original
    config.write_text('{"rope": 1}')
    assert fingerprint(directory, "fp32") != original
    config.write_text("{}")
    single_file(tmp_path, {"a": torch.arange(4000.0) + 1})
    assert fingerprint(directory, "fp32") != original


def test_a_fingerprint_needs_every_shard(tmp_path: Path) -> None:
    directory = sharded(tmp_path, {"first": torch.ones(4)})
    (directory / "config.json").write_text("{}")
    (directory / "model-00000.safetensors").unlink()

    with pytest.raises(ConfigError, match="cannot read the checkpoint"):
        fingerprint(directory, "fp32")
