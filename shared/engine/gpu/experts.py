"""A rank's experts as two grouped products over rows sorted by expert.

Nothing is read back: how many rows an expert gets stays on the device.
"""

import torch
import torch.nn.functional as F


class GroupedExperts:
    """Adjacent experts, first_expert onwards."""

    def __init__(
        self,
        first_expert: int,
        gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden] bf16
        down: torch.Tensor,  # [experts, hidden, intermediate] bf16
    ) -> None:
        self._first = first_expert
        self._gate_up = gate_up
        self._down = down

    def __call__(
        self,
        hidden: torch.Tensor,  # [n, hidden] bf16
        choice: torch.Tensor,  # [n, k] int64 expert ids, -1 = none
    ) -> torch.Tensor:  # [n, k, hidden]; zero where another rank holds the expert
        """See Experts."""
        outputs = hidden.new_zeros((*choice.shape, hidden.shape[1]))
        if not choice.numel():
            return outputs
        num_experts = len(self._gate_up)
        local = choice.flatten() - self._first
        # Other ranks' rows sort behind all of ours and belong to no group.
        local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
        expert, order = torch.sort(local, stable=True)
        ends = torch.searchsorted(
            expert, torch.arange(num_experts, device=expert.device), right=True
        ).int()
        rows = hidden[order // choice.shape[1]]
        gate, up = F.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self._down.transpose(1, 2), offs=ends)
        # What lies behind the last group is not written by the products.
        made = torch.where((expert < num_experts).unsqueeze(1), made, 0)
        outputs.view(-1, hidden.shape[1])[order] = made
        return outputs
