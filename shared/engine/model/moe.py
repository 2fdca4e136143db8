"""Mixture of experts, its experts sharded over the ranks that also share queries and KV.

Each rank computes its own experts for every rank's tokens; contributions come back per (token,
choice) and are added in the order of the choices, so the sum has the same bits for every number of
ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from shared.engine.comm import RankGroup
from shared.engine.model.config import MoeConfig
from shared.engine.model.layers import MlpWeights, Product, mlp
from shared.engine.tiles import by_rows, padded, spread

# Rows of scores that fill whole vectors: torch computes what is left over with another exp.
_VECTOR_ROWS = 4


class Experts(Protocol):
    """This rank's experts."""

    def __call__(
        self,
        hidden: torch.Tensor,  # [n, hidden]
        choice: torch.Tensor,  # [n, k] int64 expert ids, -1 = none
    ) -> torch.Tensor:  # [n, k, hidden]; zero where another rank holds the expert
        """Each chosen expert's output."""
        ...


@dataclass(frozen=True)
class MoeWeights:
    """Router, this rank's experts, and the shared expert every rank holds."""

    router: Product  # hidden to num_experts, fp32
    correction_bias: torch.Tensor  # [num_experts] fp32, chooses but does not weigh
    experts: Experts  # this rank's
    shared_expert: MlpWeights


def expert_range(num_experts: int, group: RankGroup) -> range:
    """The experts a rank holds: contiguous, sizes differing by at most one."""
    return range(
        num_experts * group.rank // group.size, num_experts * (group.rank + 1) // group.size
    )


def route(
    weights: MoeWeights,
    config: MoeConfig,
    hidden: torch.Tensor,  # [n, hidden]
) -> tuple[torch.Tensor, torch.Tensor]:  # [n, k] int64 expert ids, [n, k] fp32 gates
    """Each token's experts and their weights, computed in fp32."""
    scores = torch.sigmoid(padded(weights.router(hidden.float()), _VECTOR_ROWS))[: len(hidden)]
    choice = (scores + weights.correction_bias).topk(config.num_experts_per_token, -1).indices
    gates = scores.gather(1, choice)
    gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    return choice, gates * config.scaling_factor


def moe(
    weights: MoeWeights,
    config: MoeConfig,
    hidden: torch.Tensor,  # [n, hidden]: rows equal on all ranks, then this rank's own
    num_replicated: int,
    padded_len: int,  # own rows of the widest rank; 0 when all rows are replicated
    group: RankGroup,
) -> torch.Tensor:  # [n, hidden]
    """Routed experts plus the shared expert. Collective over the group."""
    choice, gates = by_rows(partial(route, weights, config), hidden)
    contributions = weights.experts(hidden[:num_replicated], choice[:num_replicated])
    group.sum_to_all(contributions)
    if padded_len:
        own = _dispatch(
            weights, hidden[num_replicated:], choice[num_replicated:], padded_len, group
        )
        contributions = torch.cat((contributions, own))
    routed = (contributions * gates.unsqueeze(-1)).sum(1)
    return routed.to(hidden.dtype) + by_rows(partial(mlp, weights.shared_expert), hidden)


def _dispatch(
    weights: MoeWeights,
    hidden: torch.Tensor,  # [own, hidden]
    choice: torch.Tensor,  # [own, k]
    padded_len: int,
    group: RankGroup,
) -> torch.Tensor:  # [own, k, hidden]
    """Own tokens' expert outputs: all ranks' tokens in, this rank's experts applied, contributions
    back.
    """
    own = hidden.shape[0]
    padded = hidden.new_zeros((padded_len, hidden.shape[1]))
    padded[:own] = hidden
    # Padding rows are routed nowhere: id -1 matches no expert.
    padded_choice = choice.new_full((padded_len, choice.shape[1]), -1)
    padded_choice[:own] = choice
    outputs = weights.experts(group.all_gather(padded), group.all_gather(padded_choice))
    return group.sum_to_owner(outputs)[:own]


class LocalExperts:
    """Experts one by one, shared out over the compute threads."""

    def __init__(self, by_id: Mapping[int, MlpWeights]) -> None:
        self.by_id = by_id

    def __call__(self, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """See Experts."""
        outputs = hidden.new_zeros((*choice.shape, hidden.shape[1]))
        chosen = set(choice.flatten().tolist())

        def compute(experts: Sequence[int]) -> None:
            for expert in experts:
                token, slot = torch.where(choice == expert)
                outputs[token, slot] = mlp(self.by_id[expert], hidden[token])

        spread(compute, sorted(chosen & self.by_id.keys()))
        return outputs
