"""Checkpoint tensors: safetensors shards of a Hugging Face directory, bf16 or block-FP8, by name.

Reads only what is asked for, so an expert-parallel rank never touches other ranks' experts. Block-
FP8 is decided by the presence of a scale tensor, not by the config's exclusion list, which names a
module that does not exist.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ConfigError

_SCALE_SUFFIX = "_scale_inv"
_FP8_BLOCK = 128  # rows and columns that share one scale


@dataclass(frozen=True)
class StoredWeight:
    """A matrix as the file holds it."""

    values: torch.Tensor  # [out, in] bf16 or fp32, or float8_e4m3fn with scales
    scale_inv: torch.Tensor | None = None  # [ceil(out / 128), ceil(in / 128)] fp32

    def dense(self) -> torch.Tensor:  # [out, in]
        """The matrix itself, in fp32 if it was quantised."""
        if self.scale_inv is None:
            return self.values
        return dequantise_blocks(self.values, self.scale_inv)


class Checkpoint:
    """Named tensors of one checkpoint directory; use it as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shard_of = _tensor_table(directory)
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The tensor `name`, dequantised where it is block-FP8. Raises what `stored` raises."""
        return self.stored(name, shape).dense().to(dtype)

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """The tensor `name` as it is.

        Raises ConfigError when it is missing, has another shape, or is FP8 without scales.
        """
        values = self._read(name)
        if tuple(values.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(values.shape)}, the config wants {shape}")
        if values.dtype != torch.float8_e4m3fn:
            return StoredWeight(values)
        return StoredWeight(values, self._scales(name, shape))

    def _scales(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name + _SCALE_SUFFIX not in self:
            raise ConfigError(f"{name} is float8 but {name + _SCALE_SUFFIX} is missing")
        scales = self._read(name + _SCALE_SUFFIX)
        blocks = tuple(-(-size // _FP8_BLOCK) for size in shape)
        if tuple(scales.shape) != blocks:
            raise ConfigError(
                f"{name} of shape {shape} wants {blocks} scales, not {tuple(scales.shape)}"
            )
        return scales

    def _read(self, name: str) -> torch.Tensor:
        shard = self._shard_of.get(name)
        if shard is None:
            raise ConfigError(f"the checkpoint {self._directory} has no tensor {name}")
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(self._directory / shard, framework="pt")
            tensor: torch.Tensor = self._open[shard].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"cannot read {name} from {self._directory / shard}: {error}"
            ) from error
        return tensor


def dequantise_blocks(
    weight: torch.Tensor,  # [rows, columns] float8_e4m3fn
    scale_inv: torch.Tensor,  # [ceil(rows / 128), ceil(columns / 128)] fp32
) -> torch.Tensor:  # [rows, columns] fp32
    """Weight times its block's scale; the last block of either axis may be short (kv_a_proj: 576
    rows).
    """
    rows, columns = weight.shape
    scale = scale_inv.float().repeat_interleave(_FP8_BLOCK, 0)[:rows]
    return weight.float() * scale.repeat_interleave(_FP8_BLOCK, 1)[:, :columns]


def fingerprint(checkpoint: Path, kv_format: str) -> str:
    """A short name for everything that changes KV bytes; workers with different ones never hand
    off.

    Covers the config, the tensor table, every shard's size and 64 KiB of its middle: hashing
    hundreds of gigabytes at each start is not worth what it would add.
    """
    digest = hashlib.sha256(kv_format.encode())
    try:
        digest.update((checkpoint / "config.json").read_bytes())
        table = _tensor_table(checkpoint)
        digest.update(json.dumps(sorted(table.items())).encode())
        for shard in sorted(set(table.values())):
            path = checkpoint / shard
            num_bytes = path.stat().st_size
            with path.open("rb") as file:
                file.seek(num_bytes // 2)
                digest.update(f"{num_bytes}".encode() + file.read(65536))
    except OSError as error:
        raise ConfigError(f"cannot read the checkpoint {checkpoint}: {error}") from error
    return digest.hexdigest()[:16]


def _tensor_table(directory: Path) -> dict[str, str]:
    """Tensor name to shard file name."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    try:
        if index.exists():
            return dict(json.loads(index.read_text())["weight_map"])
        with safe_open(single, framework="pt") as shard:
            return dict.fromkeys(shard.keys(), single.name)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{directory} is not a safetensors checkpoint: {error}") from error
