"""The parts of a decoder layer that are the same for every composition: projections, rotary
embedding, MLPs.

Weights are plain tensors in frozen dataclasses. Rotary pairs are adjacent (interleaved) and stay in
place, as in FlashMLA's cache; transformers writes them as halves, with equal dot products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from shared.engine.model.config import AttentionConfig

_KEY_NORM_EPS = 1e-6  # the indexer's LayerNorm, fixed in every implementation

Product = Callable[[torch.Tensor], torch.Tensor]  # [n, in] -> [n, out]: rows @ weight.T


class HeadProducts(Protocol):
    """Each head's product with its own matrix."""

    def __call__(
        self,
        rows: torch.Tensor,  # [n, heads, in]
        out: torch.Tensor,  # [n, heads, out], written
    ) -> None:
        """Write the products."""
        ...


class Rope:
    """Cosines and sines of positions, computed as every serving stack does: fp32 position x fp32
    frequency.
    """

    def __init__(self, rope_dim: int, theta: float, device: torch.device) -> None:
        steps = torch.arange(0, rope_dim, 2, dtype=torch.int64).float() / rope_dim
        self._frequencies = (1.0 / theta**steps).to(device)

    def angles(
        self,
        positions: torch.Tensor,  # [n] int64
    ) -> torch.Tensor:  # [n, rope_dim / 2] complex64
        """One unit complex number per rotary pair."""
        angle = positions.float()[:, None] * self._frequencies
        return torch.polar(torch.ones_like(angle), angle)


def rotate(
    vectors: torch.Tensor,  # [n, ..., rope_dim]
    angles: torch.Tensor,  # [n, rope_dim / 2] complex64
) -> torch.Tensor:  # of the vectors' type
    """Each adjacent pair turned by its angle, in fp32."""
    pairs = torch.view_as_complex(vectors.float().contiguous().unflatten(-1, (-1, 2)))
    shape = (angles.shape[0], *(1,) * (vectors.ndim - 2), angles.shape[1])
    return torch.view_as_real(pairs * angles.view(shape)).flatten(-2).to(vectors.dtype)


@dataclass(frozen=True)
class IndexerWeights:
    """The lightning indexer of a layer that owns one."""

    query: Product  # q_lora_rank to heads * index_dim
    key: Product  # hidden to index_dim
    key_norm: torch.Tensor  # [index_dim]
    key_norm_bias: torch.Tensor  # [index_dim]
    head_weights: Product  # hidden to heads


@dataclass(frozen=True)
class AttentionWeights:
    """Multi-head latent attention, key and value up-projections kept apart for absorption."""

    q_a: Product  # hidden to q_lora_rank
    q_a_norm: torch.Tensor  # [q_lora_rank]
    q_b: Product  # q_lora_rank to heads * (nope + rope)
    kv_a: Product  # hidden to kv_lora_rank + rope
    kv_a_norm: torch.Tensor  # [kv_lora_rank]
    key_up: HeadProducts  # of each head: nope to kv_lora_rank
    value_up: HeadProducts  # of each head: kv_lora_rank to value_dim
    out: Product  # heads * value_dim to hidden
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class NewKv:
    """What a layer caches of its input rows."""

    latent: torch.Tensor  # [n, latent_dim]
    index_key: torch.Tensor | None  # [n, index_dim]; None where the layer owns no indexer


@dataclass(frozen=True)
class Queries:
    """What a layer's attention asks with."""

    query: torch.Tensor  # [n, heads, latent_dim] absorbed: comparable with cached rows
    index_query: torch.Tensor | None  # [n, index_heads, index_dim]
    index_weights: torch.Tensor | None  # [n, index_heads], scales included


def project_kv(
    weights: AttentionWeights,
    config: AttentionConfig,
    hidden: torch.Tensor,  # [n, hidden] after the input norm
    angles: torch.Tensor,  # [n, rope_dim / 2]
    eps: float,
) -> NewKv:
    """The latent row, and for an index owner its key."""
    latent = weights.kv_a(hidden)
    normed = rms_norm(latent[:, : config.kv_lora_rank], weights.kv_a_norm, eps)
    rotated = rotate(latent[:, config.kv_lora_rank :], angles)
    index_key = None
    if weights.indexer is not None:
        index_key = F.layer_norm(
            weights.indexer.key(hidden),
            (config.index_dim,),
            weights.indexer.key_norm,
            weights.indexer.key_norm_bias,
            _KEY_NORM_EPS,
        )
        index_key = _rotate_start(index_key, config.rope_dim, angles)
    return NewKv(torch.cat((normed, rotated), -1), index_key)


def project_queries(
    weights: AttentionWeights,
    config: AttentionConfig,
    hidden: torch.Tensor,  # [n, hidden] after the input norm
    angles: torch.Tensor,  # [n, rope_dim / 2]
    eps: float,
) -> Queries:
    """Queries absorbed into the latent space, and for an index owner its query and head weights."""
    query_latent = rms_norm(weights.q_a(hidden), weights.q_a_norm, eps)
    query = weights.q_b(query_latent).unflatten(1, (config.num_heads, -1))
    nope, rope = query[..., : config.nope_dim], query[..., config.nope_dim :]
    absorbed = query.new_empty((*query.shape[:2], config.kv_lora_rank + config.rope_dim))
    weights.key_up(nope, absorbed[..., : config.kv_lora_rank])
    absorbed[..., config.kv_lora_rank :] = rotate(rope, angles)
    index_query, index_weights = None, None
    if weights.indexer is not None:
        index_query = weights.indexer.query(query_latent).unflatten(1, (config.index_heads, -1))
        index_query = _rotate_start(index_query, config.rope_dim, angles)
        # Both factors of the score's scale ride on the head weights; they are positive, so ReLU
        # commutes with them.
        scale = config.index_heads**-0.5 * config.index_dim**-0.5
        index_weights = weights.indexer.head_weights(hidden).float() * scale
    return Queries(absorbed, index_query, index_weights)


def _rotate_start(vectors: torch.Tensor, rope_dim: int, angles: torch.Tensor) -> torch.Tensor:
    return torch.cat((rotate(vectors[..., :rope_dim], angles), vectors[..., rope_dim:]), -1)


def merge_heads(
    weights: AttentionWeights,
    config: AttentionConfig,
    attended: torch.Tensor,  # [n, heads, kv_lora_rank]
) -> torch.Tensor:  # [n, hidden]
    """Attention's output: each head's value up-projection, then the output projection."""
    values = attended.new_empty((*attended.shape[:2], config.value_dim))
    weights.value_up(attended, values)
    return weights.out(values.flatten(1))


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

    gate_up: Product  # hidden to 2 * intermediate
    down: Product  # intermediate to hidden


def mlp(weights: MlpWeights, hidden: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x))."""
    gate, up = weights.gate_up(hidden).chunk(2, -1)
    return weights.down(F.silu(gate) * up)
