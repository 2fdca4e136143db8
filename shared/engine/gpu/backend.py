"""One rank's weights on a CUDA device: bf16 matrices, experts stacked for grouped products.

Block-FP8 matrices are dequantised when they are read.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from shared.engine.gpu.experts import GroupedExperts
from shared.engine.model.layers import MlpWeights
from shared.engine.model.weights import StoredWeight


class GpuBackend:
    """Makes weights for one device. On a CPU device it is the same arithmetic, for tests."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, weight: StoredWeight) -> "Dense":
        """See Backend."""
        return Dense(self._dense(weight))

    def router(self, weight: torch.Tensor) -> "Dense":
        """See Backend."""
        return Dense(weight.to(self.device))

    def heads(self, weights: torch.Tensor) -> "BatchedHeads":
        """See Backend."""
        return BatchedHeads(weights.to(self.device).contiguous())

    def mlp(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> MlpWeights:
        """See Backend."""
        return MlpWeights(
            Dense(torch.cat((self._dense(gate), self._dense(up)))), Dense(self._dense(down))
        )

    def experts(
        self, weights: Mapping[int, tuple[StoredWeight, StoredWeight, StoredWeight]]
    ) -> GroupedExperts:
        """See Backend."""
        ids = sorted(weights)
        gate_up = [
            torch.cat((self._dense(weights[expert][0]), self._dense(weights[expert][1])))
            for expert in ids
        ]
        down = [self._dense(weights[expert][2]) for expert in ids]
        return GroupedExperts(ids[0], torch.stack(gate_up), torch.stack(down))

    def _dense(self, weight: StoredWeight) -> torch.Tensor:
        # To the device first: an expert is dequantised there in a hundredth of the time.
        scale = weight.scale_inv
        moved = StoredWeight(
            weight.values.to(self.device), None if scale is None else scale.to(self.device)
        )
        return moved.dense().to(self.dtype)


class Dense:
    """A matrix as it is."""

    def __init__(self, weight: torch.Tensor) -> None:  # [out, in]
        self.weight = weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Product."""
        return F.linear(rows, self.weight)


class BatchedHeads:
    """All heads' products in one batched one."""

    def __init__(self, weights: torch.Tensor) -> None:  # [heads, out, in]
        self._transposed = weights.transpose(1, 2)

    def __call__(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See HeadProducts."""
        out.copy_(torch.bmm(rows.transpose(0, 1), self._transposed).transpose(0, 1))
