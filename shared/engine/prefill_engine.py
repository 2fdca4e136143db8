"""One rank of a prefill worker: PrefillStep in, KV in the pool and sampled tokens out.

Knows tensors and its place in the group; knows nothing of requests' lives, other services or the
network.
"""

import torch

from shared.engine.model.transformer import Transformer
from shared.engine.prefill_kv import KvContext, PrefillKv, StepLayout
from shared.engine.sampler import sample
from shared.engine.step import Chunk, PrefillStep, Sampled, StepResult
from shared.engine.tiles import torch_alone


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
        return StepResult(self._sample(step.chunks, hidden))

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
        token_ids = sample(self._model.logits(rows).cpu(), samplings)
        return {
            chunk.request_id: Sampled(token_id, row.numpy().tobytes())
            for (chunk, _), token_id, row in zip(last, token_ids, rows.float().cpu(), strict=True)
        }

    def _check_plan(self, step: PrefillStep) -> None:
        if self._group.size == 1:
            return
        digest = torch.frombuffer(bytearray(step.digest()), dtype=torch.uint8).unsqueeze(0)
        digests = self._group.all_gather(digest.to(self._context.pool.rows.device))
        if not bool((digests == digests[0]).all()):
            raise PlanMismatch("ranks disagree on the step to run")
