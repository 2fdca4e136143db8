"""What passes between a request's life and the step loop: what to compute, and how far it is."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash
from shared.engine.kv.allocator import Allocation
from shared.engine.step import Sampled, Sampling
from shared.stages import Stage, Stages


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
    num_prompt_logprobs: int | None = None  # tell the prompt's: all of it is computed
    admitted: asyncio.Future[Allocation] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    sampled: asyncio.Future[Sampled] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    progress: Progress = field(default_factory=Progress)
    allocation: Allocation | None = None  # the step loop's
    awaited: BlockHash | None = None  # the step loop's: another prompt was computing this block
    stages: Stages = field(default_factory=Stages)
    telling: Stage | None = None  # begins when the token is drawn
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # of chunks, in order

    def __post_init__(self) -> None:
        self._queueing = self.stages.begin("prefill.queue")

    def admit(self, allocation: Allocation) -> None:
        """It has its blocks."""
        self.allocation = allocation
        self._queueing.end(self.num_tokens)
        if not self.admitted.done():  # it may just be cancelled, and not released yet
            self.admitted.set_result(allocation)

    def finish(self, sampled: Sampled) -> None:
        """Its next token is drawn."""
        self.telling = self.stages.begin("prefill.first_token")
        if not self.sampled.done():
            self.sampled.set_result(sampled)

    @property
    def num_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.token_ids)

    @property
    def may_hit(self) -> bool:
        """Whether cached blocks serve: they do not hold what logprobs are made of."""
        return self.num_prompt_logprobs is None
