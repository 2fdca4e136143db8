"""Logprobs of tokens, and of the likeliest at their places; on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared import farspan_pb2 as pb

_ROWS_AT_ONCE = 16  # keys are made of some 40 bytes a logit: 100 MB with GLM-5.3's vocabulary
_LAST_ID = 2**32 - 1


@dataclass(frozen=True)
class Likeliest:
    """What is told of some rows, still on their device."""

    chosen: torch.Tensor  # [n] fp32
    token_ids: torch.Tensor  # [n, num_top] int64, the likeliest first
    logprobs: torch.Tensor  # [n, num_top] fp32

    def numbers(self) -> torch.Tensor:  # [n, 1 + 2 * num_top] int64
        """All of it as whole numbers, a row each, to be read back with others; see `messages`."""
        values = torch.cat((self.chosen.unsqueeze(1), self.logprobs), 1)
        return torch.cat((values.view(torch.int32).long(), self.token_ids), 1)


def likeliest(
    logits: torch.Tensor,  # [n, vocab] fp32
    token_ids: torch.Tensor,  # [n] int64: whose logprobs are wanted
    num_top: int,
) -> Likeliest:
    """Natural logarithms of the softmax; of equals the lower id comes first."""
    pieces = [
        _of_piece(
            logits[first : first + _ROWS_AT_ONCE], token_ids[first : first + _ROWS_AT_ONCE], num_top
        )
        for first in range(0, len(logits), _ROWS_AT_ONCE)
    ]
    return Likeliest(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _of_piece(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = torch.logsumexp(logits, -1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - total
    top = _keys(logits).topk(num_top).values
    top_ids = _LAST_ID - (top & _LAST_ID)
    return chosen.squeeze(1), top_ids, logits.gather(1, top_ids) - total


def _keys(logits: torch.Tensor) -> torch.Tensor:
    """All different, unlike logits: by logit ascending, then by id descending."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: the two zeros are equal
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (rising << 32) + (_LAST_ID - ids)


def message(
    numbers: npt.NDArray[np.int64],  # [n, 1 + 2 * most]
    num_top: int,
) -> pb.TokenLogprobs:
    """The wire form of rows of `Likeliest.numbers`, of which num_top of the likeliest are told."""
    most = (numbers.shape[1] - 1) // 2
    values = np.ascontiguousarray(numbers[:, : 1 + most]).astype("<i4")
    return pb.TokenLogprobs(
        num_top=num_top,
        chosen=values[:, 0].tobytes(),
        top_token_ids=numbers[:, 1 + most : 1 + most + num_top].astype("<u4").tobytes(),
        top_logprobs=values[:, 1 : 1 + num_top].tobytes(),
    )


def of_rows(
    logits: torch.Tensor,  # [n, vocab] fp32
    token_ids: Sequence[int],
    num_top: int,
) -> pb.TokenLogprobs:
    """The wire form at once, where the host waits anyway."""
    wanted = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    return message(likeliest(logits, wanted, num_top).numbers().cpu().numpy(), num_top)
