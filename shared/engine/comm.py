"""Collectives among the ranks of one worker, over torch.distributed.

Gloo on CPU, NCCL on GPU. Byte tensors only need uint8, which both know; float8 is sent as bytes. A
group of one does nothing, so single-rank code is the same code.
"""

import torch
import torch.distributed as dist


class RankGroup:
    """This process's place among `size` ranks."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_gather(
        self,
        tensor: torch.Tensor,  # [n, ...], the same shape on every rank
    ) -> torch.Tensor:  # [size * n, ...], rank-major
        """Every rank's tensor, one after another."""
        if self.size == 1:
            return tensor
        out = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(out, tensor.contiguous())
        return out

    def sum_to_owner(
        self,
        tensor: torch.Tensor,  # [size * n, ...] fp32
    ) -> torch.Tensor:  # [n, ...]
        """This rank's slice of the sum over ranks."""
        if self.size == 1:
            return tensor
        out = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        dist.reduce_scatter_tensor(out, tensor.contiguous())
        return out

    def sum_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, written into the argument."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor
