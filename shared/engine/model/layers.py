"""The parts of a decoder layer that are the same for every composition: projections, rotary
embedding, MLPs.

Weights are plain tensors in frozen dataclasses. Rotary pairs are adjacent (interleaved) and stay in
place, as in FlashMLA's cache; transformers writes them as halves, with equal dot products.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shared.engine.model.config import AttentionConfig

_KEY_NORM_EPS = 1e-6  # the indexer's LayerNorm, fixed in every implementation


class Rope:
    """Cosines and sines of positions, computed as every serving stack does: fp32 position x fp32
    frequency.
    """

    def __init__(self, rope_dim: int, theta: float) -> None:
        steps = torch.arange(0, rope_dim, 2, dtype=torch.int64).float() / rope_dim
        self._frequencies = 1.0 / theta**steps

    def angles(
        self,
        positions: torch.Tensor,  # [n] int64
    ) -> torch.Tensor:  # [n, rope_dim / 2] complex64
        """One unit complex number per rotary pair."""
        angle = positions.float()[:, None] * self._frequencies
        return torch.polar(torch.ones_like(angle), angle)


def rotate(
    vectors: torch.Tensor,  # [n, ..., rope_dim] fp32
    angles: torch.Tensor,  # [n, rope_dim / 2] complex64
) -> torch.Tensor:
    """Each adjacent pair turned by its angle."""
    pairs = torch.view_as_complex(vectors.contiguous().unflatten(-1, (-1, 2)))
    shape = (angles.shape[0], *(1,) * (vectors.ndim - 2), angles.shape[1])
    return torch.view_as_real(pairs * angles.view(shape)).flatten(-2)


@dataclass(frozen=True)
class IndexerWeights:
    """The lightning indexer of a layer that owns one."""

    query: torch.Tensor  # [heads * index_dim, q_lora_rank]
    key: torch.Tensor  # [index_dim, hidden]
    key_norm: torch.Tensor  # [index_dim]
    key_norm_bias: torch.Tensor  # [index_dim]
    head_weights: torch.Tensor  # [heads, hidden]


@dataclass(frozen=True)
class AttentionWeights:
    """Multi-head latent attention, key and value up-projections kept apart for absorption."""

    q_a: torch.Tensor  # [q_lora_rank, hidden]
    q_a_norm: torch.Tensor  # [q_lora_rank]
    q_b: torch.Tensor  # [heads * (nope + rope), q_lora_rank]
    kv_a: torch.Tensor  # [kv_lora_rank + rope, hidden]
    kv_a_norm: torch.Tensor  # [kv_lora_rank]
    key_up: torch.Tensor  # [heads, nope, kv_lora_rank]
    value_up: torch.Tensor  # [heads, kv_lora_rank, value_dim]
    out: torch.Tensor  # [hidden, heads * value_dim]
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class Projected:
    """What one layer's attention needs of its input rows."""

    query: torch.Tensor  # [n, heads, latent_dim] absorbed: comparable with cached rows
    latent: torch.Tensor  # [n, latent_dim] the rows to cache
    index_query: torch.Tensor | None  # [n, index_heads, index_dim]
    index_weights: torch.Tensor | None  # [n, index_heads], scales included
    index_key: torch.Tensor | None  # [n, index_dim]


def project(
    weights: AttentionWeights,
    config: AttentionConfig,
    hidden: torch.Tensor,  # [n, hidden] after the input norm
    angles: torch.Tensor,  # [n, rope_dim / 2]
    eps: float,
) -> Projected:
    """Queries, the latent row, and for an index owner its query, head weights and key."""
    query_latent = rms_norm(hidden @ weights.q_a.T, weights.q_a_norm, eps)
    query = (query_latent @ weights.q_b.T).unflatten(1, (config.num_heads, -1))
    nope, rope = query[..., : config.nope_dim], query[..., config.nope_dim :]
    absorbed = torch.bmm(nope.transpose(0, 1), weights.key_up).transpose(0, 1)
    latent = hidden @ weights.kv_a.T
    normed = rms_norm(latent[:, : config.kv_lora_rank], weights.kv_a_norm, eps)
    rotated = rotate(latent[:, config.kv_lora_rank :], angles)
    index_query, index_weights, index_key = None, None, None
    if weights.indexer is not None:
        index_query, index_weights, index_key = _project_index(
            weights.indexer, config, hidden, query_latent, angles
        )
    return Projected(
        query=torch.cat((absorbed, rotate(rope, angles)), -1),
        latent=torch.cat((normed, rotated), -1),
        index_query=index_query,
        index_weights=index_weights,
        index_key=index_key,
    )


def _project_index(
    weights: IndexerWeights,
    config: AttentionConfig,
    hidden: torch.Tensor,
    query_latent: torch.Tensor,
    angles: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = (query_latent @ weights.query.T).unflatten(1, (config.index_heads, -1))
    key = F.layer_norm(
        hidden @ weights.key.T,
        (config.index_dim,),
        weights.key_norm,
        weights.key_norm_bias,
        _KEY_NORM_EPS,
    )
    # Both factors of the score's scale ride on the head weights; they are positive, so ReLU
    # commutes.
    scale = config.index_heads**-0.5 * config.index_dim**-0.5
    head_weights = (hidden @ weights.head_weights.T).float() * scale
    rope = config.rope_dim
    query = torch.cat((rotate(query[..., :rope], angles), query[..., rope:]), -1)
    key = torch.cat((rotate(key[:, :rope], angles), key[:, rope:]), -1)
    return query, head_weights, key


def merge_heads(
    weights: AttentionWeights,
    attended: torch.Tensor,  # [n, heads, kv_lora_rank]
) -> torch.Tensor:  # [n, hidden]
    """Attention's output: each head's value up-projection, then the output projection."""
    values = torch.bmm(attended.transpose(0, 1), weights.value_up).transpose(0, 1)
    return values.flatten(1) @ weights.out.T


def rms_norm(
    hidden: torch.Tensor,  # [..., d]
    weight: torch.Tensor,  # [d]
    eps: float,
) -> torch.Tensor:
    """Root-mean-square norm."""
    return F.rms_norm(hidden, (weight.shape[0],), weight, eps)


@dataclass(frozen=True)
class MlpWeights:
    """A gated MLP; gate and up are one matrix so that they are one product."""

    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


def mlp(weights: MlpWeights, hidden: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x))."""
    gate, up = (hidden @ weights.gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ weights.down.T
