"""The model's dimensions and rules, read from a Hugging Face config.json.

Knows GLM-5.3 (GlmMoeDsaForCausalLM) and refuses what it does not implement. Rules follow vLLM and
SGLang, which serve the real weights; where transformers differs (the latent norms' epsilon) they
win.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.json_file import read_object

_FIXED = {  # fields with one supported value: another would change results silently
    "model_type": "glm_moe_dsa",
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head latent attention and its indexer; all dimensions in elements."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int  # width of the latent, which is also the value read by attention
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_topk: int

    @property
    def latent_dim(self) -> int:
        """Width of one cached row: the normed latent, then the rotated part."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def scale(self) -> float:
        """Softmax scale; no YaRN factor in this family."""
        return float((self.nope_dim + self.rope_dim) ** -0.5)


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: sigmoid router with a correction bias used for choosing only."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    scaling_factor: float


@dataclass(frozen=True)
class ModelConfig:
    """Everything the engine needs to know about the architecture."""

    vocab_size: int
    hidden_size: int
    dense_intermediate_size: int
    num_layers: int  # without the MTP layer, whose id is num_layers
    is_moe: tuple[bool, ...]  # [num_layers + 1]
    owns_indexer: tuple[bool, ...]  # [num_layers + 1]; the MTP layer always owns one
    attention: AttentionConfig
    moe: MoeConfig
    rope_theta: float
    rms_norm_eps: float
    max_position: int
    stop_token_ids: tuple[int, ...]

    @property
    def num_kv_layers(self) -> int:
        """Layers with a latent row: all, and the MTP layer."""
        return self.num_layers + 1

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Layers with index keys, in order; the MTP layer is the last."""
        return tuple(layer for layer, owns in enumerate(self.owns_indexer) if owns)

    @property
    def index_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that share one selection: the owner first, then its followers."""
        groups: list[list[int]] = []
        for layer, owns in enumerate(self.owns_indexer):
            if owns:
                groups.append([layer])
            else:
                groups[-1].append(layer)
        return tuple(tuple(group) for group in groups)


def load_config(checkpoint: Path) -> ModelConfig:
    """The configuration of a checkpoint directory.

    Raises ConfigError naming the file and the field that is missing, contradictory or not
    supported.
    """
    path = checkpoint / "config.json"
    raw = read_object(path)
    try:
        return parse_config(raw)
    except KeyError as error:
        raise ConfigError(f"{path} has no field {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """A ModelConfig from config.json's content; KeyError for a missing field."""
    for field, wanted in _FIXED.items():
        if raw.get(field, wanted) != wanted:
            raise ConfigError(f"{field}={raw[field]!r} is not supported, only {wanted!r}")
    rope = _object(raw["rope_parameters"], "rope_parameters")
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_type={rope['rope_type']!r} is not supported, only 'default'")
    num_layers = _size(raw, "num_hidden_layers")
    stop = raw.get("eos_token_id", [])
    return ModelConfig(
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=_size(raw, "hidden_size"),
        dense_intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        is_moe=(*_moe_layers(raw, num_layers), True),
        owns_indexer=(*_indexer_owners(raw, num_layers), True),
        attention=_attention(raw),
        moe=MoeConfig(
            num_experts=_size(raw, "n_routed_experts"),
            num_experts_per_token=_size(raw, "num_experts_per_tok"),
            num_shared_experts=_size(raw, "n_shared_experts"),
            intermediate_size=_size(raw, "moe_intermediate_size"),
            scaling_factor=_number(raw, "routed_scaling_factor"),
        ),
        rope_theta=_number(rope, "rope_theta"),
        rms_norm_eps=_number(raw, "rms_norm_eps"),
        max_position=_size(raw, "max_position_embeddings"),
        stop_token_ids=tuple(stop if isinstance(stop, list) else [stop]),
    )


def _attention(raw: dict[str, Any]) -> AttentionConfig:
    # head_dim is not read: files carry a meaningless value (facts of the released configs).
    config = AttentionConfig(
        num_heads=_size(raw, "num_attention_heads"),
        q_lora_rank=_size(raw, "q_lora_rank"),
        kv_lora_rank=_size(raw, "kv_lora_rank"),
        nope_dim=_size(raw, "qk_nope_head_dim"),
        rope_dim=_size(raw, "qk_rope_head_dim"),
        value_dim=_size(raw, "v_head_dim"),
        index_heads=_size(raw, "index_n_heads"),
        index_dim=_size(raw, "index_head_dim"),
        index_topk=_size(raw, "index_topk"),
    )
    if (
        raw.get("qk_head_dim", config.nope_dim + config.rope_dim)
        != config.nope_dim + config.rope_dim
    ):
        raise ConfigError("qk_head_dim is not qk_nope_head_dim + qk_rope_head_dim")
    if config.index_dim < config.rope_dim:
        raise ConfigError("index_head_dim is smaller than qk_rope_head_dim")
    return config


def _moe_layers(raw: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    types = raw.get("mlp_layer_types")
    by_rule = tuple(layer >= int(raw["first_k_dense_replace"]) for layer in range(num_layers))
    if types is not None and tuple(kind == "sparse" for kind in types) != by_rule:
        raise ConfigError("mlp_layer_types contradicts first_k_dense_replace")
    if raw.get("moe_layer_freq", 1) != 1:
        raise ConfigError("moe_layer_freq other than 1 is not supported")
    return by_rule


def _indexer_owners(raw: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers own an indexer.

    Peers read different fields, so all that are given must agree.
    """
    freq = _size(raw, "index_topk_freq") if "index_topk_freq" in raw else 1
    offset = raw.get("index_skip_topk_offset", 2)
    sources: dict[str, tuple[bool, ...]] = {}
    if "indexer_types" in raw:
        sources["indexer_types"] = tuple(kind == "full" for kind in raw["indexer_types"])
    if raw.get("index_topk_pattern"):
        sources["index_topk_pattern"] = tuple(kind == "F" for kind in raw["index_topk_pattern"])
    if "index_topk_freq" in raw or not sources:
        sources["index_topk_freq"] = tuple(
            max(layer - offset + 1, 0) % freq == 0 for layer in range(num_layers)
        )
    if len(set(sources.values())) != 1:
        raise ConfigError(f"{' and '.join(sources)} name different layers as indexer owners")
    owners = next(iter(sources.values()))
    if len(owners) != num_layers or not owners[0]:
        raise ConfigError("layer 0 must own an indexer and every layer must be named")
    return owners


def _size(raw: dict[str, Any], field: str) -> int:
    value = raw[field]
    if type(value) is not int or value < 1:
        raise ConfigError(f"{field}={value!r} is not a positive integer")
    return value


def _number(raw: dict[str, Any], field: str) -> float:
    value = raw[field]
    if type(value) not in (int, float) or value <= 0:
        raise ConfigError(f"{field}={value!r} is not a positive number")
    return float(value)


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} is not a JSON object")
    return value
