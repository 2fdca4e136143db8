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


# torch's CPU products add up in another order for fewer rows than this, unless a multiple of
# four (docs/LOG.md, 2026-11-30).
_STEADY_ROWS = 12
_ROW_STEP = 4


def project(
    rows: torch.Tensor,  # [n, in]
    weight: torch.Tensor,  # [out, in]
) -> torch.Tensor:  # [n, out]
    """rows @ weight.T, where a row's bits do not depend on how many rows stand beside it."""
    return (_steady(rows) @ weight.T)[: len(rows)]


def whole_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows, and zero rows up to a multiple of four."""
    num_missing = -len(rows) % _ROW_STEP
    if not num_missing:
        return rows
    return torch.cat((rows, rows.new_zeros((num_missing, *rows.shape[1:]))))


def _steady(rows: torch.Tensor) -> torch.Tensor:
    return whole_rows(rows) if len(rows) < _STEADY_ROWS else rows


def _project_heads(
    rows: torch.Tensor,  # [n, heads, in]
    weights: torch.Tensor,  # [heads, in, out]
) -> torch.Tensor:  # [n, heads, out]
    """Each head's product with its own matrix; bits as in `project`."""
    return torch.bmm(_steady(rows).transpose(0, 1), weights).transpose(0, 1)[: len(rows)]


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
    latent = project(hidden, weights.kv_a)
    normed = rms_norm(latent[:, : config.kv_lora_rank], weights.kv_a_norm, eps)
    rotated = rotate(latent[:, config.kv_lora_rank :], angles)
    index_key = None
    if weights.indexer is not None:
        index_key = F.layer_norm(
            project(hidden, weights.indexer.key),
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
    query_latent = rms_norm(project(hidden, weights.q_a), weights.q_a_norm, eps)
    query = project(query_latent, weights.q_b).unflatten(1, (config.num_heads, -1))
    nope, rope = query[..., : config.nope_dim], query[..., config.nope_dim :]
    # Copied into place: joining a transposed tensor with another takes ten times as long.
    absorbed = query.new_empty((*query.shape[:2], config.kv_lora_rank + config.rope_dim))
    absorbed[..., : config.kv_lora_rank] = _project_heads(nope, weights.key_up)
    absorbed[..., config.kv_lora_rank :] = rotate(rope, angles)
    index_query, index_weights = None, None
    if weights.indexer is not None:
        index_query = project(query_latent, weights.indexer.query).unflatten(
            1, (config.index_heads, -1)
        )
        index_query = _rotate_start(index_query, config.rope_dim, angles)
        # Both factors of the score's scale ride on the head weights; they are positive, so ReLU
        # commutes with them.
        scale = config.index_heads**-0.5 * config.index_dim**-0.5
        index_weights = project(hidden, weights.indexer.head_weights).float() * scale
    return Queries(absorbed, index_query, index_weights)


def _rotate_start(vectors: torch.Tensor, rope_dim: int, angles: torch.Tensor) -> torch.Tensor:
    return torch.cat((rotate(vectors[..., :rope_dim], angles), vectors[..., rope_dim:]), -1)


def merge_heads(
    weights: AttentionWeights,
    attended: torch.Tensor,  # [n, heads, kv_lora_rank]
) -> torch.Tensor:  # [n, hidden]
    """Attention's output: each head's value up-projection, then the output projection."""
    values = _project_heads(attended, weights.value_up)
    return project(values.flatten(1), weights.out)


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
    gate, up = project(hidden, weights.gate_up).chunk(2, -1)
    return project(F.silu(gate) * up, weights.down)
