"""Checkpoint tensors under their Hugging Face names to the weights one rank holds."""

from pathlib import Path

import torch

from shared.engine.comm import RankGroup
from shared.engine.model.backend import Backend
from shared.engine.model.config import ModelConfig
from shared.engine.model.layers import AttentionWeights, IndexerWeights, MlpWeights, Product
from shared.engine.model.moe import MoeWeights, expert_range
from shared.engine.model.transformer import LayerWeights, ModelWeights, MtpWeights
from shared.engine.model.weights import Checkpoint, StoredWeight


def load_weights(
    directory: Path, config: ModelConfig, group: RankGroup, backend: Backend
) -> ModelWeights:
    """The rank's parameters; of the routed experts only its own are read."""
    with Checkpoint(directory) as checkpoint:
        return _Loader(checkpoint, config, group, backend).model()


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, group: RankGroup, backend: Backend
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._group = group
        self._backend = backend

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name, shape, self._backend.dtype)
        return tensor.to(self._backend.device)

    def _linear(self, name: str, *shape: int) -> Product:
        return self._backend.linear(self._checkpoint.stored(name, shape))

    def model(self) -> ModelWeights:
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        return ModelWeights(
            embedding=self._tensor("model.embed_tokens.weight", *table),
            layers=tuple(self._layer(layer) for layer in range(config.num_layers)),
            final_norm=self._tensor("model.norm.weight", config.hidden_size),
            head=self._linear("lm_head.weight", *table),
            mtp=self._mtp(),
        )

    def _mtp(self) -> MtpWeights:
        width = self._config.hidden_size
        prefix = f"model.layers.{self._config.num_layers}."
        return MtpWeights(
            embedding_norm=self._tensor(prefix + "enorm.weight", width),
            hidden_norm=self._tensor(prefix + "hnorm.weight", width),
            projection=self._linear(prefix + "eh_proj.weight", width, 2 * width),
            layer=self._layer(self._config.num_layers),
            final_norm=self._tensor(prefix + "shared_head.norm.weight", width),
        )

    def _layer(self, layer: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{layer}."
        return LayerWeights(
            input_norm=self._tensor(prefix + "input_layernorm.weight", config.hidden_size),
            post_attention_norm=self._tensor(
                prefix + "post_attention_layernorm.weight", config.hidden_size
            ),
            attention=self._attention(prefix + "self_attn.", config.owns_indexer[layer]),
            feed_forward=(
                self._moe(prefix + "mlp.")
                if config.is_moe[layer]
                else self._mlp(prefix + "mlp.", config.dense_intermediate_size)
            ),
        )

    def _attention(self, prefix: str, owns_indexer: bool) -> AttentionWeights:
        attention, width = self._config.attention, self._config.hidden_size
        heads, rank = attention.num_heads, attention.kv_lora_rank
        per_head = attention.nope_dim + attention.value_dim
        up = self._tensor(prefix + "kv_b_proj.weight", heads * per_head, rank)
        key_up, value_up = up.unflatten(0, (heads, per_head)).split(
            (attention.nope_dim, attention.value_dim), 1
        )
        query_dim = attention.nope_dim + attention.rope_dim
        return AttentionWeights(
            q_a=self._linear(prefix + "q_a_proj.weight", attention.q_lora_rank, width),
            q_a_norm=self._tensor(prefix + "q_a_layernorm.weight", attention.q_lora_rank),
            q_b=self._linear(prefix + "q_b_proj.weight", heads * query_dim, attention.q_lora_rank),
            kv_a=self._linear(prefix + "kv_a_proj_with_mqa.weight", attention.latent_dim, width),
            kv_a_norm=self._tensor(prefix + "kv_a_layernorm.weight", rank),
            key_up=self._backend.heads(key_up.transpose(1, 2)),
            value_up=self._backend.heads(value_up),
            out=self._linear(prefix + "o_proj.weight", width, heads * attention.value_dim),
            indexer=self._indexer(prefix + "indexer.") if owns_indexer else None,
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        attention, width = self._config.attention, self._config.hidden_size
        heads, dim = attention.index_heads, attention.index_dim
        return IndexerWeights(
            query=self._linear(prefix + "wq_b.weight", heads * dim, attention.q_lora_rank),
            key=self._linear(prefix + "wk.weight", dim, width),
            key_norm=self._tensor(prefix + "k_norm.weight", dim),
            key_norm_bias=self._tensor(prefix + "k_norm.bias", dim),
            head_weights=self._linear(prefix + "weights_proj.weight", heads, width),
        )

    def _mlp(self, prefix: str, intermediate: int) -> MlpWeights:
        return self._backend.mlp(*self._gated(prefix, intermediate))

    def _gated(
        self, prefix: str, intermediate: int
    ) -> tuple[StoredWeight, StoredWeight, StoredWeight]:
        """Gate, up and down of a gated MLP."""
        width, stored = self._config.hidden_size, self._checkpoint.stored
        return (
            stored(prefix + "gate_proj.weight", (intermediate, width)),
            stored(prefix + "up_proj.weight", (intermediate, width)),
            stored(prefix + "down_proj.weight", (width, intermediate)),
        )

    def _moe(self, prefix: str) -> MoeWeights:
        moe, width = self._config.moe, self._config.hidden_size
        router = self._checkpoint.tensor(
            prefix + "gate.weight", (moe.num_experts, width), torch.float32
        )
        bias = self._checkpoint.tensor(
            prefix + "gate.e_score_correction_bias", (moe.num_experts,), torch.float32
        )
        return MoeWeights(
            router=self._backend.router(router),
            correction_bias=bias.to(self._backend.device),
            experts=self._backend.experts(
                {
                    expert: self._gated(f"{prefix}experts.{expert}.", moe.intermediate_size)
                    for expert in expert_range(moe.num_experts, self._group)
                }
            ),
            shared_expert=self._mlp(
                prefix + "shared_experts.", moe.intermediate_size * moe.num_shared_experts
            ),
        )
