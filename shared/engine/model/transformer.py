"""The decoder stack and the MTP layer over an abstract KV.

Knows layers and their order; does not know where KV lies, who computes which row, or how attention
reads it: that is the KvStep given by prefill or decode.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from shared.engine.comm import RankGroup
from shared.engine.model.config import ModelConfig
from shared.engine.model.layers import (
    AttentionWeights,
    MlpWeights,
    NewKv,
    Product,
    Queries,
    Rope,
    merge_heads,
    mlp,
    project_kv,
    project_queries,
    rms_norm,
)
from shared.engine.model.moe import MoeWeights, moe
from shared.engine.tiles import by_rows


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: torch.Tensor  # [hidden]
    post_attention_norm: torch.Tensor  # [hidden]
    attention: AttentionWeights
    feed_forward: MlpWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """The multi-token-prediction layer: a decoder layer behind a projection of (next embedding,
    hidden).
    """

    embedding_norm: torch.Tensor  # [hidden]
    hidden_norm: torch.Tensor  # [hidden]
    projection: Product  # 2 * hidden, embedding first, to hidden
    layer: LayerWeights
    final_norm: torch.Tensor  # [hidden]


@dataclass(frozen=True)
class ModelWeights:
    """All parameters one rank holds."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: Product  # hidden to vocab
    mtp: MtpWeights


class KvStep(Protocol):
    """KV as one step sees it; calls come layer by layer, `write` before `attend`."""

    def write(self, layer: int, new: NewKv) -> None:
        """Cache the step's new latent rows, and index keys if the layer owns an indexer."""
        ...

    def attend(self, layer: int, queries: Queries) -> torch.Tensor:  # [n, heads, kv_lora_rank]
        """Sparse attention of the queries; an index owner first chooses its group's positions."""
        ...


@dataclass(frozen=True)
class StepRows:
    """The rows one rank computes in one pass."""

    positions: torch.Tensor  # [n] int64, rotary positions
    num_replicated: int  # leading rows that every rank computes alike
    padded_len: int  # own rows of the widest rank


class Transformer:
    """One rank's model."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, group: RankGroup) -> None:
        self.config = config
        self.weights = weights
        self._group = group
        self._rope = Rope(config.attention.rope_dim, config.rope_theta, weights.embedding.device)

    def forward(
        self,
        token_ids: torch.Tensor,  # [n] int64
        rows: StepRows,
        kv: KvStep,
    ) -> torch.Tensor:  # [n, hidden] after the final norm
        """The target model's hidden states. Collective over the group."""
        hidden = self.weights.embedding[token_ids]
        angles = self._rope.angles(rows.positions)
        for layer, weights in enumerate(self.weights.layers):
            hidden = self.layer(layer, weights, hidden, angles, rows, kv)
        return rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)

    def write_mtp(
        self,
        token_ids: torch.Tensor,  # [n] int64
        previous_hidden: torch.Tensor,  # [n, hidden] the hidden of the token before each
        rows: StepRows,  # positions are those of the tokens before
        kv: KvStep,
    ) -> None:
        """Cache the MTP layer's rows of (token, hidden before it). Collective over the group.

        They are made of the layer's input alone: without a draft to propose, its attention and
        experts need not run.
        """
        weights, eps = self.weights.mtp.layer, self.config.rms_norm_eps

        def new(ids: torch.Tensor, previous: torch.Tensor, angles: torch.Tensor) -> NewKv:
            normed = rms_norm(self._mtp_input(ids, previous), weights.input_norm, eps)
            return project_kv(weights.attention, self.config.attention, normed, angles, eps)

        angles = self._rope.angles(rows.positions)
        kv.write(self.config.num_layers, by_rows(new, token_ids, previous_hidden, angles))

    def forward_mtp(
        self,
        token_ids: torch.Tensor,  # [n] int64
        previous_hidden: torch.Tensor,  # [n, hidden] the hidden of the token before each
        rows: StepRows,  # positions are those of the tokens before
        kv: KvStep,
    ) -> torch.Tensor:  # [n, hidden] after the MTP layer's final norm
        """The whole MTP layer: a draft's hidden states. Collective over the group."""
        hidden = self._mtp_input(token_ids, previous_hidden)
        weights, angles = self.weights.mtp, self._rope.angles(rows.positions)
        hidden = self.layer(self.config.num_layers, weights.layer, hidden, angles, rows, kv)
        return rms_norm(hidden, weights.final_norm, self.config.rms_norm_eps)

    def _mtp_input(self, token_ids: torch.Tensor, previous_hidden: torch.Tensor) -> torch.Tensor:
        weights, eps = self.weights.mtp, self.config.rms_norm_eps
        embedded = rms_norm(self.weights.embedding[token_ids], weights.embedding_norm, eps)
        carried = rms_norm(previous_hidden, weights.hidden_norm, eps)
        return weights.projection(torch.cat((embedded, carried), -1))

    def logits(
        self,
        hidden: torch.Tensor,  # [n, hidden] after a final norm
    ) -> torch.Tensor:  # [n, vocab] fp32
        """Scores of the next token."""
        return self.weights.head(hidden).float()

    def layer(
        self,
        layer: int,
        weights: LayerWeights,
        hidden: torch.Tensor,  # [n, hidden]
        angles: torch.Tensor,  # [n, rope_dim / 2] complex64, of the rows' positions
        rows: StepRows,
        kv: KvStep,
    ) -> torch.Tensor:  # [n, hidden]
        """One decoder layer. Collective over the group."""
        config, eps = self.config.attention, self.config.rms_norm_eps

        def enter(hidden: torch.Tensor, angles: torch.Tensor) -> tuple[NewKv, Queries]:
            normed = rms_norm(hidden, weights.input_norm, eps)
            return (
                project_kv(weights.attention, config, normed, angles, eps),
                project_queries(weights.attention, config, normed, angles, eps),
            )

        def leave(
            hidden: torch.Tensor, attended: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = hidden + merge_heads(weights.attention, config, attended)
            return hidden, rms_norm(hidden, weights.post_attention_norm, eps)

        new, queries = by_rows(enter, hidden, angles)
        kv.write(layer, new)
        hidden, normed = by_rows(leave, hidden, kv.attend(layer, queries))
        if isinstance(weights.feed_forward, MlpWeights):
            return hidden + by_rows(partial(mlp, weights.feed_forward), normed)
        return hidden + moe(
            weights.feed_forward,
            self.config.moe,
            normed,
            rows.num_replicated,
            rows.padded_len,
            self._group,
        )
