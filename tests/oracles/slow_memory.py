"""What the slow reference keeps of a token, and how a query chooses among what is kept.

A memory rounds as a KV format does; a test may put the engine's own bytes in its place, so that a
difference shows where it arises and nowhere else.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from tests.oracles.slow_quantiser import Quantiser

Vector = torch.Tensor  # [width] float64


@dataclass(frozen=True)
class Choice:
    """The positions a query may choose, first..len(scores) - 1, and their scores."""

    scores: Vector  # [position + 1]
    first: int
    topk: int

    def best(self) -> list[int]:
        """The topk by (score descending, position ascending), in order of position."""
        scores = self.scores.tolist()
        ranked = sorted(range(self.first, len(scores)), key=lambda p: (-scores[p], p))
        return sorted(ranked[: self.topk])


class Memory(Protocol):
    """What becomes of computed values before anybody attends to them."""

    def keep_row(self, layer: int, position: int, latent: Vector) -> Vector: ...
    def keep_key(self, layer: int, position: int, key: Vector) -> Vector: ...
    def keep_query(self, layer: int, position: int, query: torch.Tensor) -> torch.Tensor: ...
    def choose(self, layer: int, position: int, choice: Choice) -> list[int]: ...


class RoundedMemory:
    """Keeps what a format's bytes say; chooses the best."""

    def __init__(self, quantiser: Quantiser) -> None:
        self._quantiser = quantiser

    def keep_row(self, layer: int, position: int, latent: Vector) -> Vector:
        data = self._quantiser.encode_row(latent.numpy())
        return torch.from_numpy(self._quantiser.decode_row(data))

    def keep_key(self, layer: int, position: int, key: Vector) -> Vector:
        values, scale = self._quantiser.encode_key(key.numpy())
        return torch.from_numpy(self._quantiser.decode_key(values, scale))

    def keep_query(self, layer: int, position: int, query: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._quantiser.round_query(query.numpy()))

    def choose(self, layer: int, position: int, choice: Choice) -> list[int]:
        return choice.best()
