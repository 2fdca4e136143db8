"""A slice of GLM-5.3 with random weights: the released widths and file format, a few layers.

Three layers and the MTP layer: a dense one and one with experts that own an indexer, and one with
experts that follows. Random weights have a trained model's sizes, so that hidden states neither die
nor explode: a product keeps its input's size, and attention's scores spread over four standard
deviations. The tokenizer, and with it the vocabulary, is the bundled model's, so the slice is
served like any checkpoint. 30 GB.
"""

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from shared.engine.model.config import AttentionConfig, ModelConfig, parse_config

Fields = Mapping[str, Any]

RELEASED: Fields = {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "head_dim": 192,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "index_topk": 2048,
}
_LAYERS: Fields = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_skip_topk_offset": 2,
    "indexer_types": ["full", "full", "shared"],
}
_BUNDLED = Path(__file__).parents[1] / "checkpoints" / "demo-fp8"
_INDEX = "model.safetensors.index.json"
_BLOCK = 128  # rows and columns that share one scale
_E4M3_MAX = 448.0
_EXPERTS_A_SHARD = 32
_WRITERS = 4  # shards made at once, 1.2 GB each
_SCORE_GAIN = 2.0  # standard deviation of attention's scores


class Kind(Enum):
    """How a tensor is stored, and how large its elements are."""

    QUANTISED = "block-FP8, and its scales; its product keeps the input's size"
    MATRIX = "bf16, the same"
    EMBEDDING = "bf16, of size 1"
    NORM = "bf16 factors around 1, some channels twice others"
    SHIFT = "bf16, small"
    CORRECTION = "fp32, small beside the scores of experts"


class Tensor(NamedTuple):
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    gain: float = 1.0


def directory(seed: int = 0) -> Path:
    """The slice on this machine: written by the first who asks, to the GPU's numbers."""
    place = Path(tempfile.gettempdir()) / f"farspan-glm-slice-{seed}"
    if not (place / _INDEX).exists():
        write(place, RELEASED, seed, torch.device("cuda"))
    return place


def write(place: Path, widths: Fields, seed: int, device: torch.device) -> None:
    """Write a checkpoint directory; its index comes last, so what has one is whole.

    One seed gives one set of bytes on devices of one kind.
    """
    raw = json.loads((_BUNDLED / "config.json").read_text()) | _LAYERS | widths
    config = parse_config(raw)
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(raw, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(_BUNDLED / name, place / name)
    shards = list(_shards(config))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]

    def save(name: str, shard: Sequence[Tensor]) -> dict[str, str]:
        made = {key: value for tensor in shard for key, value in _make(tensor, seed, device)}
        save_file(made, place / name, metadata={"format": "pt"})
        return dict.fromkeys(made, name)

    with ThreadPoolExecutor(_WRITERS) as pool:
        tables = list(pool.map(save, names, shards))
    weight_map = {key: name for table in tables for key, name in table.items()}
    (place / _INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _make(tensor: Tensor, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor as it is stored, by name; with its scales if it is quantised."""
    digest = hashlib.blake2b(f"{seed} {tensor.name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest))
    numbers = torch.randn(tensor.shape, generator=generator, device=device)
    if tensor.kind is Kind.QUANTISED:
        values, scale_inv = quantise_blocks(numbers.mul_(tensor.gain * tensor.shape[1] ** -0.5))
        yield tensor.name, values.cpu()
        yield f"{tensor.name}_scale_inv", scale_inv.cpu()
    elif tensor.kind is Kind.CORRECTION:
        yield tensor.name, (numbers * 0.01).cpu()
    else:
        yield tensor.name, _plain(tensor, numbers).to(torch.bfloat16).cpu()


def _plain(tensor: Tensor, numbers: torch.Tensor) -> torch.Tensor:
    if tensor.kind is Kind.MATRIX:
        return numbers * tensor.gain * tensor.shape[1] ** -0.5
    if tensor.kind is Kind.NORM:
        return (numbers * 0.3).exp()
    return numbers * (0.1 if tensor.kind is Kind.SHIFT else 1.0)


def quantise_blocks(
    matrix: torch.Tensor,  # [out, in] fp32
) -> tuple[torch.Tensor, torch.Tensor]:  # e4m3 [out, in]; fp32 [ceil(out / 128), ceil(in / 128)]
    """Each block of 128 x 128 as e4m3 times what brings its largest value to e4m3's end."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))
    scale_inv = blocks.abs().amax((1, 3)) / _E4M3_MAX
    values = (blocks / scale_inv[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale_inv


def _shards(config: ModelConfig) -> Iterator[list[Tensor]]:
    """What stands in each file: what belongs to no layer, then of each layer all but its experts,
    and its experts some by some.
    """
    table = (config.vocab_size, config.hidden_size)
    yield [
        Tensor("model.embed_tokens.weight", table, Kind.EMBEDDING),
        Tensor("model.norm.weight", (config.hidden_size,), Kind.NORM),
        Tensor("lm_head.weight", table, Kind.MATRIX),
        *_mtp_entry(config),
    ]
    for layer, is_moe in enumerate(config.is_moe):
        prefix = f"model.layers.{layer}."
        yield [
            Tensor(f"{prefix}input_layernorm.weight", (config.hidden_size,), Kind.NORM),
            Tensor(f"{prefix}post_attention_layernorm.weight", (config.hidden_size,), Kind.NORM),
            *_attention(f"{prefix}self_attn.", config),
            *(
                _indexer(f"{prefix}self_attn.indexer.", config)
                if config.owns_indexer[layer]
                else ()
            ),
            *(_router(f"{prefix}mlp.", config) if is_moe else ()),
            *(() if is_moe else _gated(f"{prefix}mlp.", config, config.dense_intermediate_size)),
        ]
        experts = range(config.moe.num_experts if is_moe else 0)
        for first in experts[::_EXPERTS_A_SHARD]:
            yield [
                tensor
                for expert in experts[first : first + _EXPERTS_A_SHARD]
                for tensor in _gated(
                    f"{prefix}mlp.experts.{expert}.", config, config.moe.intermediate_size
                )
            ]


def _mtp_entry(config: ModelConfig) -> Iterator[Tensor]:
    prefix, width = f"model.layers.{config.num_layers}.", config.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield Tensor(f"{prefix}{norm}.weight", (width,), Kind.NORM)
    yield Tensor(f"{prefix}eh_proj.weight", (width, 2 * width), Kind.MATRIX)


def _attention(prefix: str, config: ModelConfig) -> Iterator[Tensor]:
    a, width, quantised = config.attention, config.hidden_size, Kind.QUANTISED
    query, up = a.nope_dim + a.rope_dim, a.nope_dim + a.value_dim
    yield Tensor(f"{prefix}q_a_proj.weight", (a.q_lora_rank, width), quantised)
    yield Tensor(f"{prefix}q_a_layernorm.weight", (a.q_lora_rank,), Kind.NORM)
    shape = (a.num_heads * query, a.q_lora_rank)
    yield Tensor(f"{prefix}q_b_proj.weight", shape, quantised, _SCORE_GAIN)
    yield Tensor(f"{prefix}kv_a_proj_with_mqa.weight", (a.latent_dim, width), quantised)
    yield Tensor(f"{prefix}kv_a_layernorm.weight", (a.kv_lora_rank,), Kind.NORM)
    yield Tensor(f"{prefix}kv_b_proj.weight", (a.num_heads * up, a.kv_lora_rank), quantised)
    yield Tensor(f"{prefix}o_proj.weight", (width, a.num_heads * a.value_dim), quantised)


def _indexer(prefix: str, config: ModelConfig) -> Iterator[Tensor]:
    a: AttentionConfig = config.attention
    width, dim = config.hidden_size, a.index_dim
    yield Tensor(f"{prefix}wq_b.weight", (a.index_heads * dim, a.q_lora_rank), Kind.QUANTISED)
    yield Tensor(f"{prefix}wk.weight", (dim, width), Kind.QUANTISED)
    yield Tensor(f"{prefix}k_norm.weight", (dim,), Kind.NORM)
    yield Tensor(f"{prefix}k_norm.bias", (dim,), Kind.SHIFT)
    yield Tensor(f"{prefix}weights_proj.weight", (a.index_heads, width), Kind.MATRIX)


def _router(prefix: str, config: ModelConfig) -> Iterator[Tensor]:
    moe, width = config.moe, config.hidden_size
    yield Tensor(f"{prefix}gate.weight", (moe.num_experts, width), Kind.MATRIX)
    yield Tensor(f"{prefix}gate.e_score_correction_bias", (moe.num_experts,), Kind.CORRECTION)
    shared = moe.intermediate_size * moe.num_shared_experts
    yield from _gated(f"{prefix}shared_experts.", config, shared)


def _gated(prefix: str, config: ModelConfig, inner: int) -> Iterator[Tensor]:
    for name in ("gate_proj", "up_proj"):
        yield Tensor(f"{prefix}{name}.weight", (inner, config.hidden_size), Kind.QUANTISED)
    yield Tensor(f"{prefix}down_proj.weight", (config.hidden_size, inner), Kind.QUANTISED)


def main() -> int:
    """Write the slice, or find it, and say where and how long it took."""
    if not torch.cuda.is_available():
        sys.stderr.write("30 GB of random numbers are made on a CUDA device, and there is none\n")
        return 2
    began_s = time.monotonic()
    place = directory()
    print(f"{place} after {time.monotonic() - began_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
