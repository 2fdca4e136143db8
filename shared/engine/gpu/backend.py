"""One rank's weights on a CUDA device, experts stacked for grouped products.

Matrices stay block-FP8 where they are stored so; others are bf16.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.nn.functional as F

from shared.engine.gpu.experts import DenseMlps, GroupedExperts, GroupedMlps
from shared.engine.gpu.fp8 import Fp8Dense, Fp8Mlps, fp8_matrix, joined
from shared.engine.model.layers import MlpWeights, Product
from shared.engine.model.weights import StoredWeight


class GpuBackend:
    """Makes weights for one device. On a CPU device it is the same arithmetic, for tests."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, weight: StoredWeight) -> Product:
        """See Backend."""
        if _are_fp8(weight):
            return Fp8Dense(fp8_matrix(weight, self.device))
        return Dense(self._dense(weight))

    def router(self, weight: torch.Tensor) -> "Dense":
        """See Backend."""
        return Dense(weight.to(self.device))

    def heads(self, weights: torch.Tensor) -> "BatchedHeads":
        """See Backend."""
        return BatchedHeads(weights.to(self.device).contiguous())

    def mlp(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> MlpWeights:
        """See Backend."""
        if _are_fp8(gate, up, down):
            # Filled up, gate and up are wider than down, by values that come out as zeros.
            gate_up = joined(fp8_matrix(gate, self.device), fp8_matrix(up, self.device))
            return MlpWeights(Fp8Dense(gate_up), self.linear(down))
        return MlpWeights(Dense(self._joined(gate, up)), Dense(self._dense(down)))

    def experts(
        self, weights: Mapping[int, tuple[StoredWeight, StoredWeight, StoredWeight]]
    ) -> GroupedExperts:
        """See Backend."""
        parts = [weights[expert] for expert in sorted(weights)]
        return GroupedExperts(min(weights), self._mlps(parts))

    def _mlps(
        self, parts: Sequence[tuple[StoredWeight, StoredWeight, StoredWeight]]
    ) -> GroupedMlps:
        if _are_fp8(*chain.from_iterable(parts)):
            on_device = [[fp8_matrix(weight, self.device) for weight in part] for part in parts]
            return Fp8Mlps(
                [joined(gate, up) for gate, up, _ in on_device], [down for *_, down in on_device]
            )
        return DenseMlps(
            torch.stack([self._joined(gate, up) for gate, up, _ in parts]),
            torch.stack([self._dense(down) for *_, down in parts]),
        )

    def _joined(self, gate: StoredWeight, up: StoredWeight) -> torch.Tensor:
        return torch.cat((self._dense(gate), self._dense(up)))

    def _dense(self, weight: StoredWeight) -> torch.Tensor:
        # To the device first: an expert is dequantised there in a hundredth of the time.
        scale = weight.scale_inv
        moved = StoredWeight(
            weight.values.to(self.device), None if scale is None else scale.to(self.device)
        )
        return moved.dense().to(self.dtype)


def _are_fp8(*weights: StoredWeight) -> bool:
    return all(weight.scale_inv is not None for weight in weights)


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
