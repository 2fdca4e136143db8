"""Decode on a CPU: a batch of newest tokens in, their KV in the tiers and the next tokens out.

Knows tensors and tiers; knows nothing of requests' lives, other services or the network.
"""

from collections.abc import Sequence

import torch

from shared.engine.decode_kv import DecodeKv, QueryRow
from shared.engine.decode_step import DecodeOutput, DecodeRow
from shared.engine.kv.format import KvFormat
from shared.engine.kv.host_tier import HostTier, TieredSequence
from shared.engine.kv.page_residency import StepRange
from shared.engine.kv.residency import ResidencyPolicy
from shared.engine.model.config import ModelConfig
from shared.engine.model.transformer import StepRows, Transformer
from shared.engine.sampler import asked_logprobs, sample
from shared.engine.tiles import torch_alone


class CpuDecodeEngine:
    """See DecodeEngine."""

    def __init__(
        self, model: Transformer, tier: HostTier, kv_format: KvFormat, policy: ResidencyPolicy
    ) -> None:
        self.config: ModelConfig = model.config
        self.tier = tier
        self.policy = policy
        self._model = model
        self._format = kv_format

    @torch.inference_mode()
    def step(self, rows: Sequence[DecodeRow[TieredSequence]]) -> list[DecodeOutput]:
        """See DecodeEngine."""
        torch_alone()
        self.tier.prepare([StepRange(r.sequence, r.position, r.position + 1) for r in rows])
        queries = [QueryRow(row.sequence, row.position) for row in rows]
        token_ids = torch.tensor([row.token_id for row in rows])
        positions = torch.tensor([row.position for row in rows])
        hidden = self._model.forward(
            token_ids, StepRows(positions, len(rows), 0), self._kv(queries, 0)
        )
        self._model.write_mtp(
            token_ids,
            torch.stack([row.previous_hidden for row in rows]),
            StepRows(positions - 1, len(rows), 0),
            self._kv(queries, 1),
        )
        samplings = [row.sampling for row in rows]
        logits = self._model.logits(hidden)
        drawn = sample(logits, samplings)
        told = asked_logprobs(logits, drawn, samplings)
        for row in rows:
            self.tier.confirm(row.sequence)
        return [DecodeOutput(*each) for each in zip(drawn, hidden, told, strict=True)]

    def _kv(self, queries: Sequence[QueryRow], first_position: int) -> DecodeKv:
        return DecodeKv(
            queries, self.tier, self._format, self.config, first_position=first_position
        )
