"""Decode on a GPU: numbers in, one replay, tokens out; the host waits once, for the tokens.

Knows tensors and tiers; knows nothing of requests' lives, other services or the network.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from shared.engine.decode_step import DecodeOutput, DecodeRow
from shared.engine.gpu.decode_step import DecodeStep
from shared.engine.gpu.sampler import AskedLogprobs, draw
from shared.engine.gpu.tier import GpuSequence, GpuTier
from shared.engine.gpu.transfers import on_device, sent
from shared.engine.kv.layout import BLOCK_TOKENS, IntArray
from shared.engine.kv.page_residency import StepRange
from shared.engine.kv.residency import ResidencyPolicy
from shared.engine.model.config import ModelConfig

RunStep = Callable[[int, int], None]  # DecodeStep.run, or its replay


class GpuDecodeEngine:
    """See DecodeEngine."""

    def __init__(self, step: DecodeStep, run: RunStep, policy: ResidencyPolicy) -> None:
        self.config: ModelConfig = step.model.config
        self.policy = policy
        self._step = step
        self._run = run
        self._device = step.hidden.device

    @property
    def tier(self) -> GpuTier:
        """See DecodeEngine."""
        return self._step.tier

    @torch.inference_mode()
    def step(self, rows: Sequence[DecodeRow[GpuSequence]]) -> list[DecodeOutput]:
        """See DecodeEngine. RuntimeError for more rows than the step has room for, WorkerLost for a
        device that can compute nothing any more.
        """
        with on_device(self._device):
            return self._computed(rows)

    def _computed(self, rows: Sequence[DecodeRow[GpuSequence]]) -> list[DecodeOutput]:
        step, tier, num_rows = self._step, self.tier, len(rows)
        if num_rows > step.max_rows:
            raise RuntimeError(f"{num_rows} sequences in a step, at most {step.max_rows}")
        tier.prepare([StepRange(row.sequence, row.position, row.position + 1) for row in rows])
        step.numbers.copy_(sent(self._numbers(rows), self._device))
        step.previous_hidden[:num_rows] = torch.stack([self._carried(row) for row in rows])
        last = max(row.position for row in rows)
        self._run(num_rows, last // BLOCK_TOKENS + 1)
        samplings = [row.sampling for row in rows]
        asked = AskedLogprobs(step.logits[:num_rows], samplings)
        token_ids = draw(step.logits[:num_rows], samplings)
        hidden = step.hidden[:num_rows].clone()  # the next step overwrites it
        totals = tier.tables.totals.flatten()
        told = self._told(torch.cat((token_ids, totals, asked.numbers(token_ids))))
        drawn, counted, rest = np.split(told, [num_rows, num_rows + len(totals)])
        tier.count(counted.reshape(len(tier.groups), -1))
        if drawn.min() < 0:
            raise FloatingPointError("the model's logits are not finite")
        outputs = zip(drawn.tolist(), hidden, asked.messages(rest), strict=True)
        return [DecodeOutput(*each) for each in outputs]

    def _carried(self, row: DecodeRow[GpuSequence]) -> torch.Tensor:
        """The hidden state of the token before, which comes from the host with a handoff."""
        hidden = row.previous_hidden
        if hidden.device != self._device:
            hidden = sent(hidden.numpy(), self._device)
        return hidden.to(self._step.previous_hidden.dtype)

    def _numbers(self, rows: Sequence[DecodeRow[GpuSequence]]) -> IntArray:
        numbers = np.full(tuple(self._step.numbers.shape), -1, np.int64)
        sequences = [row.sequence for row in rows]
        positions = np.array([row.position for row in rows])
        numbers[:, : len(rows)] = (
            [row.token_id for row in rows],
            positions,
            *self.tier.write_rows(sequences, positions),
            [sequence.slot for sequence in sequences],
            [sequence.slot if sequence.has_tables else -1 for sequence in sequences],
        )
        return numbers

    def _told(self, numbers: torch.Tensor) -> IntArray:
        """The numbers on the host: the one place where it waits for the device."""
        if self._device.type == "cpu":
            return numbers.numpy()
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)  # else the thread would spin
        arrived.record()
        arrived.synchronize()
        return host.numpy()
