"""What passes between a request's life and the step loop: what to compute, and how far it is."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.block_hash import BlockHash
from shared.engine.kv.allocator import Allocation
from shared.engine.step import Sampled, Sampling


class Progress:
    """How many leading tokens are complete in every layer on every rank; only grows."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._changed = asyncio.Event()

    def note(self, num_tokens: int) -> None:
        """So many are complete."""
        self._num_tokens = num_tokens
        self._changed.set()

    async def beyond(self, num_known: int) -> int:
        """How many, as soon as there are more than the caller knows of."""
        while self._num_tokens <= num_known:
            self._changed.clear()
            await self._changed.wait()
        return self._num_tokens


@dataclass(eq=False)
class Work:
    """A prompt to compute. Make it on the event loop."""

    request_id: str
    token_ids: npt.NDArray[np.uint32]
    hashes: list[BlockHash]
    sampling: Sampling
    trace: Mapping[str, str]  # the context that spans of its chunks belong to
    admitted: asyncio.Future[Allocation] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    sampled: asyncio.Future[Sampled] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    progress: Progress = field(default_factory=Progress)
    allocation: Allocation | None = None  # the step loop's
    awaited: BlockHash | None = None  # the step loop's: another prompt was computing this block

    def admit(self, allocation: Allocation) -> None:
        """It has its blocks."""
        self.allocation = allocation
        if not self.admitted.done():  # it may just be cancelled, and not released yet
            self.admitted.set_result(allocation)

    def finish(self, sampled: Sampled) -> None:
        """Its next token is drawn."""
        if not self.sampled.done():
            self.sampled.set_result(sampled)

    @property
    def num_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.token_ids)
