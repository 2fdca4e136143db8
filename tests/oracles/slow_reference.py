"""GLM-5.3 with its MTP layer written the obvious way: one sequence, float64, a query at a time.

Keys and values are expanded per head, nothing is absorbed or tiled. What is kept of a token,
and what a query chooses, goes through a Memory.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.oracles.slow_memory import Choice, Memory, Vector
from tests.oracles.transformers_oracle import dequantised_state


@dataclass(frozen=True)
class Places:
    """Where a pass's tokens stand."""

    slots: range  # their rows
    rotary: list[int]  # the positions they are turned by
    first: int  # the first selectable slot


@dataclass(frozen=True)
class Extended:
    """Hidden states after the final norms."""

    hidden: torch.Tensor  # [n, hidden]
    mtp_hidden: torch.Tensor  # [n, hidden] row p: of (token p, hidden of token p - 1)


class SlowReference:
    """One sequence; `extend` appends tokens to it."""

    def __init__(self, checkpoint: Path, memory: Memory) -> None:
        self._raw = json.loads((checkpoint / "config.json").read_text())
        self._weights = {k: v.double() for k, v in dequantised_state(checkpoint).items()}
        self._memory = memory
        self._num_layers = self._raw["num_hidden_layers"]
        # Per layer and token: keys [heads, nope + rope], values [heads, v], index key [dim].
        self._keys: list[list[torch.Tensor]] = [[] for _ in range(self._num_layers + 1)]
        self._values: list[list[torch.Tensor]] = [[] for _ in range(self._num_layers + 1)]
        self._index_keys: list[list[torch.Tensor]] = [[] for _ in range(self._num_layers + 1)]
        self._chosen: list[list[int]] = []  # of the last owner, one list per new token
        self._hidden_before = torch.zeros(self._raw["hidden_size"], dtype=torch.float64)

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int]) -> Extended:
        """Compute the next tokens of the sequence in every layer, the MTP layer included."""
        begin = len(self._keys[0])
        slots = range(begin, begin + len(token_ids))
        embedded = self._weights["model.embed_tokens.weight"][list(token_ids)]
        hidden = embedded
        for layer in range(self._num_layers):
            hidden = self._layer(layer, hidden, Places(slots, list(slots), 0))
        hidden = self._norm(hidden, "model.norm.weight")
        before = torch.cat((self._hidden_before[None], hidden[:-1]))
        self._hidden_before = hidden[-1]
        return Extended(hidden, self._mtp(embedded, before, slots))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the token after each row."""
        return hidden @ self._weights["lm_head.weight"].T

    def _mtp(self, embedded: torch.Tensor, before: torch.Tensor, slots: range) -> torch.Tensor:
        """A token's row stands in its own slot but is turned by the position before.

        Nothing precedes token 0: its row is made from a zero hidden state and never selected.
        """
        prefix = f"model.layers.{self._num_layers}."
        both = torch.cat(
            (
                self._norm(embedded, prefix + "enorm.weight"),
                self._norm(before, prefix + "hnorm.weight"),
            ),
            1,
        )
        hidden = both @ self._weights[prefix + "eh_proj.weight"].T
        rotary = [max(slot - 1, 0) for slot in slots]
        hidden = self._layer(self._num_layers, hidden, Places(slots, rotary, 1))
        return self._norm(hidden, prefix + "shared_head.norm.weight")

    def _layer(self, layer: int, hidden: torch.Tensor, places: Places) -> torch.Tensor:
        prefix = f"model.layers.{layer}."
        normed = self._norm(hidden, prefix + "input_layernorm.weight")
        hidden = hidden + self._attention(layer, prefix + "self_attn.", normed, places)
        normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        if prefix + "mlp.gate.weight" in self._weights:
            return hidden + self._moe(prefix + "mlp.", normed)
        return hidden + self._mlp(prefix + "mlp.", normed)

    def _attention(
        self, layer: int, prefix: str, normed: torch.Tensor, places: Places
    ) -> torch.Tensor:
        raw, weights = self._raw, self._weights
        nope, rank = raw["qk_nope_head_dim"], raw["kv_lora_rank"]
        compressed = self._norm(
            normed @ weights[prefix + "q_a_proj.weight"].T, prefix + "q_a_layernorm.weight"
        )
        queries = (compressed @ weights[prefix + "q_b_proj.weight"].T).unflatten(
            1, (raw["num_attention_heads"], -1)
        )
        latents = normed @ weights[prefix + "kv_a_proj_with_mqa.weight"].T
        contents = self._norm(latents[:, :rank], prefix + "kv_a_layernorm.weight")
        latents = torch.cat((contents, self._turned(latents[:, rank:], places)), 1)
        for row, slot in enumerate(places.slots):
            kept = self._memory.keep_row(layer, slot, latents[row])
            self._expand(layer, prefix, kept[:rank], kept[rank:])
        if prefix + "indexer.wk.weight" in weights:
            self._chosen = self._select(layer, prefix + "indexer.", normed, compressed, places)
        queries = torch.cat((queries[..., :nope], self._turned(queries[..., nope:], places)), -1)
        keys, values = torch.stack(self._keys[layer]), torch.stack(self._values[layer])
        out = torch.zeros((len(normed), *values.shape[1:]), dtype=torch.float64)
        for row, chosen in enumerate(self._chosen):
            if chosen:
                scores = torch.einsum("hd,khd->hk", queries[row], keys[chosen])
                scores /= queries.shape[2] ** 0.5
                out[row] = torch.einsum("hk,khd->hd", torch.softmax(scores, 1), values[chosen])
        return out.flatten(1) @ weights[prefix + "o_proj.weight"].T

    def _expand(self, layer: int, prefix: str, content: Vector, rope: Vector) -> None:
        """A kept row as keys and values of every head; the rotary part is common to all."""
        raw = self._raw
        heads, nope = raw["num_attention_heads"], raw["qk_nope_head_dim"]
        per_head = (self._weights[prefix + "kv_b_proj.weight"] @ content).view(heads, -1)
        self._keys[layer].append(torch.cat((per_head[:, :nope], rope.expand(heads, -1)), 1))
        self._values[layer].append(per_head[:, nope:])

    def _select(
        self,
        layer: int,
        prefix: str,
        normed: torch.Tensor,
        compressed: torch.Tensor,
        places: Places,
    ) -> list[list[int]]:
        heads, weights = self._raw["index_n_heads"], self._weights
        queries = (compressed @ weights[prefix + "wq_b.weight"].T).unflatten(1, (heads, -1))
        head_weights = normed @ weights[prefix + "weights_proj.weight"].T
        fresh = torch.nn.functional.layer_norm(
            normed @ weights[prefix + "wk.weight"].T,
            (self._raw["index_head_dim"],),
            weights[prefix + "k_norm.weight"],
            weights[prefix + "k_norm.bias"],
            1e-6,
        )
        queries, fresh = self._turned_front(queries, places), self._turned_front(fresh, places)
        for slot, key in zip(places.slots, fresh, strict=True):
            self._index_keys[layer].append(self._memory.keep_key(layer, slot, key))
        keys, chosen = torch.stack(self._index_keys[layer]), []
        for row, slot in enumerate(places.slots):
            query = self._memory.keep_query(layer, slot, queries[row])
            products = torch.relu(query @ keys[: slot + 1].T)  # [heads, slot + 1]
            scale = (heads * query.shape[1]) ** -0.5
            choice = Choice(head_weights[row] @ products * scale, places.first, self._topk)
            chosen.append(self._memory.choose(layer, slot, choice))
        return chosen

    @property
    def _topk(self) -> int:
        return int(self._raw["index_topk"])

    def _turned_front(self, vectors: torch.Tensor, places: Places) -> torch.Tensor:
        rope = self._raw["qk_rope_head_dim"]
        return torch.cat((self._turned(vectors[..., :rope], places), vectors[..., rope:]), -1)

    def _turned(self, vectors: torch.Tensor, places: Places) -> torch.Tensor:
        """Adjacent pairs turned; angles are fp32 products, as every serving stack has them."""
        width, theta = vectors.shape[-1], self._raw["rope_parameters"]["rope_theta"]
        frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
        angles = torch.tensor(places.rotary, dtype=torch.float32)[:, None] * frequencies
        while angles.ndim < vectors.ndim:
            angles = angles.unsqueeze(1)
        cosine, sine = angles.cos().double(), angles.sin().double()
        even, odd = vectors[..., 0::2], vectors[..., 1::2]
        pairs = (even * cosine - odd * sine, even * sine + odd * cosine)
        return torch.stack(pairs, -1).flatten(-2)

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = (rows * rows).mean(-1, keepdim=True)
        return rows / torch.sqrt(mean_square + self._raw["rms_norm_eps"]) * self._weights[name]

    def _mlp(self, prefix: str, rows: torch.Tensor) -> torch.Tensor:
        gate = rows @ self._weights[prefix + "gate_proj.weight"].T
        up = rows @ self._weights[prefix + "up_proj.weight"].T
        return (gate * torch.sigmoid(gate) * up) @ self._weights[prefix + "down_proj.weight"].T

    def _moe(self, prefix: str, rows: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(rows @ self._weights[prefix + "gate.weight"].T)
        biased = scores + self._weights[prefix + "gate.e_score_correction_bias"]
        order = biased.sort(dim=1, descending=True, stable=True).indices
        choices = order[:, : self._raw["num_experts_per_tok"]]
        out = self._mlp(prefix + "shared_experts.", rows)
        for expert in range(scores.shape[1]):
            users = torch.nonzero((choices == expert).any(1)).flatten()
            gates = scores[users, expert] / scores.gather(1, choices)[users].sum(1)
            expert_out = self._mlp(f"{prefix}experts.{expert}.", rows[users])
            out[users] += self._raw["routed_scaling_factor"] * gates[:, None] * expert_out
        return out
