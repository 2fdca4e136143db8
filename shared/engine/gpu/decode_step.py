"""A decode step as the device sees it: numbers in at fixed addresses, hidden states and logits out.

One pass of the model over a batch that is padded to one of a few sizes, so that it can be captured
once for each and replayed.
"""

import torch

from shared.engine.gpu.decode_kv import Fetches, GpuDecodeKv, StepPlaces
from shared.engine.gpu.tier import GpuTier
from shared.engine.model.transformer import StepRows, Transformer


class DecodeStep:
    """The step's tensors and what is computed with them."""

    def __init__(self, model: Transformer, tier: GpuTier, max_rows: int) -> None:
        config, embedding = model.config, model.weights.embedding
        device, dtype = embedding.device, embedding.dtype
        self.model = model
        self.tier = tier
        self._fetches = Fetches(tier.pools)
        self.max_rows = max_rows
        # Token ids, positions, host rows, device rows, slots, leases; a column each row.
        self.numbers = torch.full((6, max_rows), -1, dtype=torch.int64, device=device)
        width = config.hidden_size
        self.previous_hidden = torch.zeros((max_rows, width), dtype=dtype, device=device)
        self.hidden = torch.zeros((max_rows, width), dtype=dtype, device=device)
        self.logits = torch.zeros((max_rows, config.vocab_size), device=device)

    @torch.inference_mode()
    def run(self, num_rows: int, num_pages: int) -> None:
        """Compute the first num_rows rows; num_pages is enough for every position."""
        token_ids, positions, host_rows, device_rows, slots, leases = self.numbers[:, :num_rows]
        places = StepPlaces(positions, host_rows, device_rows, slots.clamp_min(0), leases.int())
        kv = GpuDecodeKv(places, num_pages, self.tier, self._fetches, self.model.config)
        # Padding computes something that nobody reads.
        token_ids = token_ids.clamp_min(0)
        kv.begin()
        hidden = self.model.forward(token_ids, StepRows(positions.clamp_min(0), num_rows, 0), kv)
        before = StepRows((positions - 1).clamp_min(0), num_rows, 0)
        self.model.write_mtp(token_ids, self.previous_hidden[:num_rows], before, kv)
        kv.end()
        self.hidden[:num_rows] = hidden
        self.logits[:num_rows] = self.model.logits(hidden)
