"""What differs between processors when a model is made of a checkpoint's tensors.

The decoder stack calls products and experts; a backend makes them, in the types and the places its
processor wants. The CPU's is here, the GPU's in `shared/engine/gpu/`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from shared.engine.model.layers import HeadProducts, MlpWeights, Product
from shared.engine.model.linear import Linear
from shared.engine.model.moe import Experts, LocalExperts
from shared.engine.model.weights import StoredWeight


class Backend(Protocol):
    """Makes one rank's weights."""

    device: torch.device
    dtype: torch.dtype  # of activations, and of weights that are not quantised

    def linear(self, weight: StoredWeight) -> Product:
        """rows @ weight.T of a matrix [out, in]."""
        ...

    def router(self, weight: torch.Tensor) -> Product:
        """The same of a matrix [num_experts, hidden] fp32, in fp32: a rounded score chooses other
        experts.
        """
        ...

    def heads(self, weights: torch.Tensor) -> HeadProducts:
        """The products of [heads, out, in] matrices, one a head."""
        ...

    def mlp(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> MlpWeights:
        """A gated MLP, gate and up joined."""
        ...

    def experts(
        self, weights: Mapping[int, tuple[StoredWeight, StoredWeight, StoredWeight]]
    ) -> Experts:
        """This rank's experts by id, each (gate, up, down)."""
        ...


class CpuBackend:
    """Weights packed for oneDNN, quantised ones dequantised."""

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def linear(self, weight: StoredWeight) -> Linear:
        """See Backend."""
        return Linear(weight.dense().to(self.dtype))

    def router(self, weight: torch.Tensor) -> Linear:
        """See Backend."""
        return Linear(weight)

    def heads(self, weights: torch.Tensor) -> "_Heads":
        """See Backend."""
        return _Heads([Linear(weight.contiguous()) for weight in weights])

    def mlp(self, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> MlpWeights:
        """See Backend."""
        gate_up = torch.cat((gate.dense(), up.dense())).to(self.dtype)
        return MlpWeights(Linear(gate_up), self.linear(down))

    def experts(
        self, weights: Mapping[int, tuple[StoredWeight, StoredWeight, StoredWeight]]
    ) -> LocalExperts:
        """See Backend."""
        return LocalExperts({expert: self.mlp(*parts) for expert, parts in weights.items()})


class _Heads:
    """One packed product a head."""

    def __init__(self, heads: Sequence[Linear]) -> None:
        self._heads = heads

    def __call__(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See HeadProducts."""
        for head, product in enumerate(self._heads):
            out[:, head] = product(rows[:, head])
