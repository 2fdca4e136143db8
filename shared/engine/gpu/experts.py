"""A rank's experts as grouped products over rows sorted by expert.

Nothing is read back: how many rows an expert gets stays on the device.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class GroupedMlps(Protocol):
    """Gated MLPs of adjacent experts, applied to rows group by group."""

    def __len__(self) -> int:
        """How many experts there are."""
        ...

    def __call__(
        self,
        hidden: torch.Tensor,  # [m, hidden] bf16
        sources: torch.Tensor,  # [n] int64: the row of hidden that is row i, expert after expert
        ends: torch.Tensor,  # [experts] int32: the row behind each expert's last
        outputs: torch.Tensor,  # [n, hidden] bf16, written in place
        targets: torch.Tensor,  # [n] int64, all distinct
    ) -> None:
        """Row i's output goes to outputs[targets[i]]; that of rows behind the last end nowhere."""
        ...


class GroupedExperts:
    """Adjacent experts, first_expert onwards."""

    def __init__(self, first_expert: int, mlps: GroupedMlps) -> None:
        self._first = first_expert
        self._mlps = mlps

    def __call__(
        self,
        hidden: torch.Tensor,  # [n, hidden] bf16
        choice: torch.Tensor,  # [n, k] int64 expert ids, -1 = none
    ) -> torch.Tensor:  # [n, k, hidden]; zero where another rank holds the expert
        """See Experts."""
        outputs = hidden.new_zeros((*choice.shape, hidden.shape[1]))
        if not choice.numel():
            return outputs
        num_experts = len(self._mlps)
        local = choice.flatten() - self._first
        # Other ranks' rows sort behind all of ours and belong to no group.
        local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
        expert, order = torch.sort(local, stable=True)
        ends = torch.searchsorted(
            expert, torch.arange(num_experts, device=expert.device), right=True
        ).int()
        self._mlps(hidden, order // choice.shape[1], ends, outputs.view(-1, hidden.shape[1]), order)
        return outputs


class DenseMlps:
    """Matrices as they are: torch's grouped products."""

    def __init__(
        self,
        gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden] bf16
        down: torch.Tensor,  # [experts, hidden, intermediate] bf16
    ) -> None:
        self._gate_up = gate_up
        self._down = down

    def __len__(self) -> int:
        return len(self._down)

    def __call__(
        self,
        hidden: torch.Tensor,
        sources: torch.Tensor,
        ends: torch.Tensor,
        outputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """See GroupedMlps."""
        rows = hidden[sources]
        gate, up = F.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self._down.transpose(1, 2), offs=ends)
        # What lies behind the last group is not written by the products.
        live = torch.arange(len(made), device=made.device) < ends[-1]
        outputs[targets] = torch.where(live.unsqueeze(1), made, 0)
