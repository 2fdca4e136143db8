"""Layers of one checkpoint on a processor and in fp32 on the CPU, each given the same input there.

The processor runs a prompt; its last rows are computed again on the CPU, layer by layer from what
the layer was given, over the same cached rows and the same chosen positions. So a difference is one
layer's own. Expert ids are not given: what a layer adds is compared where both chose the same.

    ours, reference = load(checkpoint, backend, make_ops, n), load_reference(checkpoint, n)
    ours.run(token_ids, chunk_tokens)
    compare(ours, reference, token_ids)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from shared.engine.attention_ops import AttentionOps, CpuAttentionOps
from shared.engine.comm import RankGroup
from shared.engine.kv.format import Fp8Format, e4m3_values
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding
from shared.engine.kv.pool import BlockPool
from shared.engine.model.backend import Backend
from shared.engine.model.config import AttentionConfig, ModelConfig, load_config
from shared.engine.model.layers import MlpWeights, Rope
from shared.engine.model.loading import load_weights
from shared.engine.model.moe import Experts, LocalExperts, MoeWeights, route
from shared.engine.model.transformer import LayerWeights, ModelWeights, Transformer
from shared.engine.model.weights import StoredWeight
from shared.engine.prefill_kv import KvContext, PrefillKv, StepLayout
from shared.engine.step import Chunk

NUM_COMPARED = 8  # the last rows; each more needs some more experts in fp32
TokenIds = npt.NDArray[np.uint32]
SHARDING = Sharding(1, BLOCK_TOKENS)

_BLOCK = 128
_Gated = tuple[StoredWeight, StoredWeight, StoredWeight]
MakeOps = Callable[[Fp8Format, AttentionConfig], AttentionOps]


@dataclass(frozen=True)
class Comparison:
    """Relative errors of the last rows, and shares of equal choices."""

    rows: float  # of the latent rows as they are cached
    attended: float  # of attention's output before its projection
    added: float  # of what the layer adds to its input, where the same experts were chosen
    expert_outputs: float  # of each chosen expert's output, given the same input; 0 without experts
    same_positions: float  # of those an index owner chooses
    same_experts: float  # of tokens


# A bf16 rounding has a relative error of 0.17 % (root mean square), and a layer has some ten one
# after another. Rows are rounded before they are cached: 2 in 100 of their values go to the next
# step of e4m3 then, 9 % away. Attention's scores have sizes of 2 and more, which makes their error
# one of as much in its weights.
TOLERANCE = Comparison(
    rows=0.03,
    attended=0.015,
    added=0.015,
    expert_outputs=0.008,
    same_positions=0.98,
    same_experts=0.75,  # the eighth and the ninth best of 256 lie close together
)


@dataclass
class _Routed:
    """What the experts were given and made."""

    hidden: torch.Tensor  # [n, hidden]
    choice: torch.Tensor  # [n, k]
    outputs: torch.Tensor  # [n, k, hidden]


@dataclass
class _Seen:
    """What one layer was given and made."""

    given: torch.Tensor  # [n, hidden]
    made: torch.Tensor  # [n, hidden]
    rows: torch.Tensor  # [n, latent_dim]
    attended: torch.Tensor  # [n, heads, kv_lora_rank]
    attended_to: torch.Tensor  # [n, topk] positions
    wanted: torch.Tensor  # [n, topk] what the last owner so far chose by itself
    routed: _Routed | None


def load(
    checkpoint: Path, backend: Backend, make_ops: MakeOps, num_tokens: int
) -> "RecordingModel":
    """A model with room for so many tokens."""
    config, group = load_config(checkpoint), RankGroup()
    kv_format, num_blocks = Fp8Format(config.attention), -(-num_tokens // BLOCK_TOKENS)
    pool = BlockPool(config, kv_format, num_blocks, epoch=1, device=backend.device)
    ops = _RecordingOps(make_ops(kv_format, config.attention))
    context = KvContext(pool, ops, config.attention.kv_lora_rank, SHARDING, group)
    weights = load_weights(checkpoint, config, group, backend)
    return RecordingModel(config, weights, context, ops, num_tokens)


def load_reference(checkpoint: Path, num_tokens: int) -> "RecordingModel":
    """The CPU's, in fp32."""
    return load(checkpoint, _PlainBackend(), CpuAttentionOps, num_tokens)


@torch.inference_mode()
def compare(
    ours: "RecordingModel", reference: "RecordingModel", token_ids: TokenIds
) -> dict[int, Comparison]:
    """Of every layer that ours has recorded, the MTP layer as the last."""
    reference.run_again(ours, token_ids)
    return {layer: _compare(layer, ours, reference) for layer in ours.seen}


class _PlainBackend:
    """Products in fp32; experts are dequantised when they are used, as few are."""

    device = torch.device("cpu")
    dtype = torch.float32

    def linear(self, *parts: StoredWeight) -> Any:
        weight = torch.cat([_dense(part) for part in parts])
        return lambda rows: F.linear(rows, weight)

    def router(self, weight: torch.Tensor) -> Any:
        return lambda rows: F.linear(rows, weight)

    def heads(self, weights: torch.Tensor) -> Any:
        return lambda rows, out: out.copy_(torch.einsum("nhi,hoi->nho", rows, weights))

    def mlp(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> MlpWeights:
        return MlpWeights(self.linear(gate, up), self.linear(down))

    def experts(self, weights: Mapping[int, _Gated]) -> LocalExperts:
        return LocalExperts({expert: _when_used(*parts) for expert, parts in weights.items()})


def _when_used(gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> MlpWeights:
    return MlpWeights(
        lambda rows: torch.cat([F.linear(rows, _dense(part)) for part in (gate, up)], -1),
        lambda rows: F.linear(rows, _dense(down)),
    )


def _dense(weight: StoredWeight) -> torch.Tensor:
    """As StoredWeight.dense, in a third of the time where blocks are whole."""
    rows, columns = weight.values.shape
    if weight.scale_inv is None or rows % _BLOCK or columns % _BLOCK:
        return weight.dense().float()
    values = e4m3_values(weight.values.view(torch.uint8))
    blocks = values.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    blocks.mul_(weight.scale_inv[:, None, :, None])
    return values


class Recorder:
    """What attention made last."""

    wanted: torch.Tensor  # [n, topk] positions that an owner chose
    attended_to: torch.Tensor  # [n, topk] positions that were read
    attended: torch.Tensor  # [n, heads, kv_lora_rank]


class _RecordingOps(Recorder):
    """Attention's operations; they attend as they are told."""

    told: torch.Tensor | None = None  # positions to give instead of those chosen

    def __init__(self, ops: AttentionOps) -> None:
        self._ops = ops
        self.encode_rows, self.encode_keys = ops.encode_rows, ops.encode_keys

    def choose(self, *arguments: Any) -> torch.Tensor:
        chosen = self._ops.choose(*arguments)
        self.wanted = last(chosen)
        return chosen if self.told is None else self.told

    def attend(self, query: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = self._ops.attend(query, rows, chosen)
        self.attended, self.attended_to = last(out), last(chosen)
        return out


class _Experts:
    """Experts, which keep what they made."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self.routed: _Routed | None = None

    def __call__(self, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        outputs = self.experts(hidden, choice)
        if len(hidden):
            self.routed = _Routed(last(hidden), last(choice), last(outputs))
        return outputs


class RecordingModel(Transformer):
    """Keeps what each layer was given and made, of the last rows."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        context: KvContext,
        ops: _RecordingOps,
        num_tokens: int,
    ) -> None:
        layers = tuple(map(_recording, weights.layers))
        mtp = replace(weights.mtp, layer=_recording(weights.mtp.layer))
        super().__init__(config, replace(weights, layers=layers, mtp=mtp), context.group)
        self.context, self.ops, self.num_tokens = context, ops, num_tokens
        self.recorder: Recorder = ops
        self.seen: dict[int, _Seen] = {}

    def weights_of(self, layer: int) -> LayerWeights:
        return (*self.weights.layers, self.weights.mtp.layer)[layer]

    def cached_rows(self, layer: int) -> torch.Tensor:
        """[n, latent_dim]"""
        rows = self.context.pool.rows[:, layer].flatten(0, 1)[: self.num_tokens]
        return Fp8Format(self.config.attention).decode_rows(last(rows))

    def layer(
        self, layer: int, weights: LayerWeights, hidden: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        made = super().layer(layer, weights, hidden, *rest)
        self.seen[layer] = _Seen(
            given=last(hidden),
            made=last(made),
            rows=self.cached_rows(layer),
            attended=self.recorder.attended,
            attended_to=self.recorder.attended_to,
            wanted=self.recorder.wanted,
            routed=getattr(getattr(weights.feed_forward, "experts", None), "routed", None),
        )
        return made

    @torch.inference_mode()
    def run(self, token_ids: TokenIds, chunk_tokens: int) -> None:
        """A whole prompt, the MTP layer's attention and experts included."""
        before = self.weights.embedding.new_zeros((1, self.config.hidden_size))
        for chunk in _chunks(token_ids, chunk_tokens):
            layout = StepLayout((chunk,), SHARDING, 0, before.device)
            kv = PrefillKv(layout, self.context)
            hidden = self.forward(layout.token_ids, layout.rows(0), kv)
            previous = torch.cat((before, hidden[:-1]))
            kv = PrefillKv(layout, self.context, first_position=1)
            self.forward_mtp(layout.token_ids, previous, layout.rows(-1), kv)
            before = hidden[-2:-1]  # the next chunk begins with the last token

    def run_again(self, other: "RecordingModel", token_ids: TokenIds) -> None:
        """The last rows of every layer over what another model's layers were given and cached."""
        self.context.pool.rows.copy_(other.context.pool.rows)
        self.context.pool.index_pages.copy_(other.context.pool.index_pages)
        start, mtp = len(token_ids) - NUM_COMPARED, self.config.num_layers
        blocks = tuple(range(-(-len(token_ids) // BLOCK_TOKENS)))
        layout = StepLayout((Chunk("text", token_ids[start:], start, 0, blocks),), SHARDING, 0)
        rope = Rope(self.config.attention.rope_dim, self.config.rope_theta, torch.device("cpu"))
        kv = PrefillKv(layout, self.context)
        for layer, seen in other.seen.items():
            rows = layout.rows(-1 if layer == mtp else 0)
            if layer == mtp:
                kv = PrefillKv(layout, self.context, first_position=1)
            self.ops.told = seen.attended_to.long()
            angles = rope.angles(rows.positions)
            self.layer(layer, self.weights_of(layer), seen.given.float(), angles, rows, kv)


def _chunks(token_ids: TokenIds, chunk_tokens: int) -> Iterator[Chunk]:
    """Each but the first begins one token early."""
    for first in range(0, len(token_ids), chunk_tokens):
        end, early = min(first + chunk_tokens, len(token_ids)), 1 if first else 0
        blocks = tuple(range(-(-end // BLOCK_TOKENS)))
        yield Chunk("text", token_ids[first - early : end], first - early, early, blocks)


def _recording(weights: LayerWeights) -> LayerWeights:
    if not isinstance(weights.feed_forward, MoeWeights):
        return weights
    experts = _Experts(weights.feed_forward.experts)
    return replace(weights, feed_forward=replace(weights.feed_forward, experts=experts))


def _compare(layer: int, ours: RecordingModel, theirs: RecordingModel) -> Comparison:
    seen, expected = ours.seen[layer], theirs.seen[layer]
    same_experts, outputs = torch.ones(NUM_COMPARED, dtype=torch.bool), 0.0
    if seen.routed and expected.routed:
        moe: Any = theirs.weights_of(layer).feed_forward
        given = seen.routed.hidden.float()
        choice, _ = route(moe, theirs.config.moe, given)
        assert _equal_sets(choice, seen.routed.choice).all(), "routed otherwise"
        outputs = _error(seen.routed.outputs, moe.experts.experts(given, seen.routed.choice))
        same_experts = _equal_sets(expected.routed.choice, seen.routed.choice)
    pairs = zip(seen.attended_to.tolist(), expected.wanted.tolist(), strict=True)
    return Comparison(
        rows=_error(seen.rows, expected.rows),
        attended=_error(seen.attended, expected.attended),
        added=_error(
            (seen.made.float() - seen.given.float())[same_experts],
            (expected.made - expected.given)[same_experts],
        ),
        expert_outputs=outputs,
        same_positions=sum(len({*a} & {*b}) / len({*a}) for a, b in pairs) / NUM_COMPARED,
        same_experts=float(same_experts.float().mean()),
    )


def _equal_sets(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours.sort().values == theirs.sort().values).all(-1)


def last(rows: torch.Tensor) -> torch.Tensor:
    """Of these, on the CPU."""
    return rows[-NUM_COMPARED:].cpu()


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())
