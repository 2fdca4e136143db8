"""One rank of a prefill worker: PrefillStep in, KV in the pool and sampled tokens out.

Knows tensors and its place in the group; knows nothing of requests' lives, other services or the
network.
"""

import numpy as np
import torch

from shared import farspan_pb2 as pb
from shared.engine.likeliest import of_rows
from shared.engine.model.transformer import Transformer
from shared.engine.prefill_kv import KvContext, PrefillKv, StepLayout
from shared.engine.sampler import asked_logprobs, sample
from shared.engine.step import Chunk, PrefillStep, Sampled, StepResult
from shared.engine.tiles import torch_alone
from shared.logprobs import joined

_ROWS_AT_ONCE = 256  # of logits: 160 MB with GLM-5.3's vocabulary


class PlanMismatch(Exception):
    """Ranks were given different steps; running them would exchange wrong rows."""


class PrefillEngine:
    """Runs steps on one rank; all ranks of the group must be given the same steps in the same
    order.
    """

    def __init__(self, model: Transformer, context: KvContext) -> None:
        self._model = model
        self._context = context
        self._group = context.group

    @torch.inference_mode()
    def run(self, step: PrefillStep) -> StepResult:
        """Compute every chunk, write its KV, draw tokens where asked. Collective.

        Raises PlanMismatch, before anything is written, when ranks disagree on the step.
        """
        self._check_plan(step)
        self._context.pool.set_generations(step.generations)
        self._context.pool.copy_blocks(step.copies)
        if not step.chunks:
            return StepResult({})
        hidden = self.hidden(step)
        return StepResult(self._sample(step.chunks, hidden), self._tell(step.chunks, hidden))

    @torch.inference_mode()
    def hidden(self, step: PrefillStep) -> torch.Tensor:  # [step tokens, hidden]
        """Write the step's KV in all layers, the MTP layer included; the target's hidden states."""
        torch_alone()
        device = self._context.pool.rows.device
        layout = StepLayout(step.chunks, self._context.sharding, self._group.rank, device)
        own_ids = layout.token_ids[layout.local_tokens]
        local = self._model.forward(own_ids, layout.rows(0), self._kv(layout, 0))
        hidden = layout.restore(local, self._group)
        # The MTP row of a token stands in that token's slot and is made from the hidden state
        # before it.
        before = torch.cat((hidden.new_zeros((1, hidden.shape[1])), hidden[:-1]))
        before[[rows_of.step_tokens.start for rows_of in layout.chunks]] = 0.0
        self._model.write_mtp(
            own_ids, before[layout.local_tokens], layout.rows(-1), self._kv(layout, 1)
        )
        return hidden

    def _kv(self, layout: StepLayout, first_position: int) -> PrefillKv:
        return PrefillKv(layout, self._context, first_position=first_position)

    def _sample(self, chunks: tuple[Chunk, ...], hidden: torch.Tensor) -> dict[str, Sampled]:
        last, begin = [], 0
        for chunk in chunks:
            begin += len(chunk.token_ids)
            if chunk.sampling is not None:
                last.append((chunk, begin - 1))
        if not last:
            return {}
        rows = hidden[[row for _, row in last]]
        samplings = [chunk.sampling for chunk, _ in last if chunk.sampling is not None]
        logits = self._model.logits(rows).cpu()
        token_ids = sample(logits, samplings)
        told = asked_logprobs(logits, token_ids, samplings)
        hiddens = [row.numpy().tobytes() for row in rows.float().cpu()]
        drawn = map(Sampled, token_ids, hiddens, told)
        return {chunk.request_id: each for (chunk, _), each in zip(last, drawn, strict=True)}

    def _tell(self, chunks: tuple[Chunk, ...], hidden: torch.Tensor) -> dict[str, pb.TokenLogprobs]:
        """Prompts' logprobs where they are asked for. The other ranks would find the same."""
        told: dict[str, pb.TokenLogprobs] = {}
        begin = 0
        for chunk in chunks:
            rows = hidden[begin : begin + len(chunk.token_ids) - 1]
            begin += len(chunk.token_ids)
            if chunk.num_prompt_logprobs is not None and self._group.rank == 0 and len(rows):
                told[chunk.request_id] = self._logprobs(chunk, rows, chunk.num_prompt_logprobs)
        return told

    def _logprobs(self, chunk: Chunk, rows: torch.Tensor, num_top: int) -> pb.TokenLogprobs:
        following = chunk.token_ids[1:].astype(np.int64).tolist()
        return joined(
            [
                of_rows(self._model.logits(piece), following[first : first + len(piece)], num_top)
                for first, piece in (
                    (first, rows[first : first + _ROWS_AT_ONCE])
                    for first in range(0, len(rows), _ROWS_AT_ONCE)
                )
            ]
        )

    def _check_plan(self, step: PrefillStep) -> None:
        if self._group.size == 1:
            return
        digest = torch.frombuffer(bytearray(step.digest()), dtype=torch.uint8).unsqueeze(0)
        digests = self._group.all_gather(digest.to(self._context.pool.rows.device))
        if not bool((digests == digests[0]).all()):
            raise PlanMismatch("ranks disagree on the step to run")
