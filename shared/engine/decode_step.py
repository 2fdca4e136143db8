"""What a decode step takes and gives, and what every decode engine is.

Plain data and two protocols: the CPU's engine is `decode_engine`, the GPU's `gpu/decode_engine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from shared import farspan_pb2 as pb
from shared.engine.kv.fetch_plan import GroupCounters
from shared.engine.kv.page_residency import PagedSequence
from shared.engine.kv.residency import ResidencyPolicy
from shared.engine.kv.tier_pools import TierPools
from shared.engine.model.config import ModelConfig
from shared.engine.step import Sampling

AnySequence = TypeVar("AnySequence", bound=PagedSequence)


@dataclass(frozen=True)
class DecodeRow(Generic[AnySequence]):
    """One sequence's part of a step."""

    sequence: AnySequence
    token_id: int  # the newest token, not cached yet
    position: int  # its position, > 0
    previous_hidden: torch.Tensor  # [hidden] post-norm, of the token before it
    sampling: Sampling


@dataclass(frozen=True)
class DecodeOutput:
    """What a sequence's part of a step gave."""

    token_id: int
    hidden: torch.Tensor  # [hidden]: the next step's previous_hidden
    logprobs: pb.TokenLogprobs | None = None  # of the token, where they were asked for


class Tier(Protocol[AnySequence]):
    """All sequences' KV on one decode rank. Used by the step thread, but for pools and counters."""

    pools: TierPools
    counters: list[GroupCounters]

    def open(self, block_ids: Sequence[int], num_shared_blocks: int = 0) -> AnySequence:
        """Begin a sequence on all its reserved blocks; the first num_shared_blocks are prefix hits.

        The other blocks' old content is forgotten here, before anything is written to them.
        """
        ...

    def close(self, sequence: AnySequence) -> None:
        """End it in any state. Its blocks stay readable for prefix hits."""
        ...

    def check_integrity(self) -> None:
        """Pools are whole; AssertionError if not. For tests and idle moments."""
        ...


class DecodeEngine(Protocol[AnySequence]):
    """Steps over batches of sequences; used by one thread, the step thread."""

    config: ModelConfig
    policy: ResidencyPolicy

    @property
    def tier(self) -> Tier[AnySequence]:
        """Where the sequences' KV lies."""
        ...

    def step(self, rows: Sequence[DecodeRow[AnySequence]]) -> list[DecodeOutput]:
        """Cache each row's token in all layers, the MTP layer included, and draw the next.

        Raises FloatingPointError for logits that are not finite and RuntimeError for rows that were
        read but not fetched; no token of the step may then be used. It may be repeated.
        """
        ...


def hidden_from_bytes(data: bytes, hidden_size: int) -> torch.Tensor:
    """A handed-over hidden state, fp32; ValueError if it has another width."""
    hidden = torch.frombuffer(bytearray(data), dtype=torch.float32)
    if hidden.shape[0] != hidden_size:
        raise ValueError(f"a hidden state of {hidden.shape[0]} elements, not {hidden_size}")
    return hidden
