"""A weight matrix as products need it: packed once, and blind to who shares its batch.

On CPU through oneDNN. torch's plain product packs the weights again at every call, which costs
three times the arithmetic at few rows, and adds up in another order for few rows than for many
(docs/LOG.md, 2026-11-30).
"""

import torch


class Linear:
    """rows @ weight.T, where a row's bits do not depend on how many rows stand beside it."""

    def __init__(self, weight: torch.Tensor) -> None:  # [out, in] on CPU, fp32 or bf16
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(
        self,
        rows: torch.Tensor,  # [n, in] of the weight's dtype
    ) -> torch.Tensor:  # [n, out]
        """The product."""
        if len(rows) == 1:
            # A lone row is multiplied as a vector, which adds up in another order.
            return self(torch.cat((rows, rows)))[:1]
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, None, "none", [], ""
        )
        return product

    @property
    def weight(self) -> torch.Tensor:  # [out, in]
        """The matrix, unpacked."""
        unpacked: torch.Tensor = self._packed.to_dense()
        return unpacked
