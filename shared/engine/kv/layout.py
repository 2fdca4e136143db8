"""Who computes which token and who keeps it: pure functions on plain integers.

Context parallelism for queries (PCP) cuts the tokens of a step in 2W chunks and gives rank r chunks
r and 2W-1-r, which balances causal work (arXiv:2411.01783). Decode-context parallelism for KV (DCP)
deals tokens to ranks I at a time. Nothing here depends on tensors' values, so every rank derives
the same plan from the same lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 64

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sharding:
    """How one request's KV is dealt to W ranks, I consecutive tokens at a time."""

    size: int  # W
    interleave: int  # I, divides BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.size < 1 or self.interleave < 1 or BLOCK_TOKENS % self.interleave:
            raise ValueError(f"no layout with W={self.size} and I={self.interleave}")

    @property
    def effective_block_tokens(self) -> int:
        """Tokens that one block id covers: one page on each rank."""
        return BLOCK_TOKENS * self.size

    def owner(self, positions: IntArray) -> IntArray:
        """The rank that keeps each position."""
        return (positions // self.interleave) % self.size

    def local_row(self, positions: IntArray) -> IntArray:
        """The row each position has in its owner's shard, counted from the sequence's start."""
        stride = self.size * self.interleave
        return (positions // stride) * self.interleave + positions % self.interleave

    def gathered_row(self, positions: IntArray, rows_per_rank: int) -> IntArray:
        """Where each position lies in the rank-major concatenation of equally long shards."""
        return self.owner(positions) * rows_per_rank + self.local_row(positions)

    def num_local(self, num_tokens: int, rank: int) -> int:
        """How many of the first num_tokens positions the rank keeps."""
        rounds, rest = divmod(num_tokens, self.size * self.interleave)
        return rounds * self.interleave + min(
            max(rest - rank * self.interleave, 0), self.interleave
        )


@dataclass(frozen=True)
class QueryPlan:
    """Which rows of a step each rank computes, and how to put gathered rows back in order.

    A step's tokens are numbered 0..num_tokens-1 over all its requests. Local rows are first the
    replicated ones (equal on all ranks), then the rank's own share, padded to `padded_len` rows for
    collectives.
    """

    num_tokens: int
    num_replicated: int
    padded_len: int  # rows of the widest rank's own share
    local_tokens: tuple[IntArray, ...]  # per rank [num_replicated + own]
    # [num_tokens] index into the replicated rows followed by the rank-major padded shares
    restore: IntArray


def is_replicated(num_tokens: int, num_ranks: int) -> bool:
    """Whether a request's share of a step is too short to cut: one of 2W chunks would be empty."""
    chunk = -(-num_tokens // (2 * num_ranks))
    return num_ranks == 1 or (2 * num_ranks - 1) * chunk >= num_tokens


def query_chunks(num_tokens: int, num_ranks: int) -> list[tuple[range, range]]:
    """The two chunks of each rank, when the request is not replicated."""
    chunk = -(-num_tokens // (2 * num_ranks))
    bounds = [min(i * chunk, num_tokens) for i in range(2 * num_ranks + 1)]
    chunks = [range(first, last) for first, last in pairwise(bounds)]
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks)]


def plan_queries(lengths: Sequence[int], num_ranks: int) -> QueryPlan:
    """The plan of a step that computes `lengths[i]` tokens of request i."""
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    replicated: list[IntArray] = []
    own: list[list[IntArray]] = [[] for _ in range(num_ranks)]
    for start, length in zip(starts, lengths, strict=False):
        if is_replicated(length, num_ranks):
            replicated.append(start + np.arange(length, dtype=np.int64))
            continue
        for rank, chunks in enumerate(query_chunks(length, num_ranks)):
            own[rank] += [start + np.arange(c.start, c.stop, dtype=np.int64) for c in chunks]
    shared_rows = _concat(replicated)
    shares = [_concat(rows) for rows in own]
    padded_len = max(len(share) for share in shares)
    restore = np.empty(int(starts[-1]), np.int64)
    restore[shared_rows] = np.arange(len(shared_rows))
    for rank, share in enumerate(shares):
        restore[share] = len(shared_rows) + rank * padded_len + np.arange(len(share))
    return QueryPlan(
        num_tokens=int(starts[-1]),
        num_replicated=len(shared_rows),
        padded_len=padded_len,
        local_tokens=tuple(np.concatenate((shared_rows, share)) for share in shares),
        restore=restore,
    )


def _concat(arrays: list[IntArray]) -> IntArray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
