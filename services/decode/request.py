"""A request's state on this worker, from its offer to its end. Used on one event loop."""

import asyncio
import time

from services.decode.answer import longest_answer
from services.decode.blocks import Holding
from services.decode.token_stream import TokenStream
from services.decode.worker import Result
from shared import farspan_pb2 as pb
from shared.errors import FarspanError
from shared.stages import Stages


class Request:
    """What its handlers tell a request; its life reads it."""

    def __init__(self, offer: pb.HandoffOffer, stream: TokenStream, max_position: int) -> None:
        self.id = offer.request_id
        self.offer = offer
        self.num_tokens = len(offer.token_ids) // 4
        self.longest_answer = longest_answer(offer.sampling, self.num_tokens, max_position)
        self.stream = stream
        self.stages = Stages()
        self.holding: Holding | None = None
        self.admitted = asyncio.Event()  # holding is set
        self.progress = asyncio.Event()  # more can be pulled
        self.num_ready_tokens = 0
        self.done: pb.PrefillDone | None = None  # once set, decode answers for the request
        self.is_released = False  # prefill has no part in it any more
        self.is_prefill_lost = False
        self.results: asyncio.Queue[Result] = asyncio.Queue()
        self.stopped: asyncio.Future[FarspanError] = asyncio.get_running_loop().create_future()

    @property
    def is_handed_over(self) -> bool:
        """Whether this worker answers for the request; before, prefill does."""
        return self.done is not None

    @property
    def remaining_s(self) -> float:
        """Until the deadline; negative after it."""
        return self.offer.deadline_unix_ms / 1000 - time.time()

    def chunk_ready(self, num_ready_tokens: int) -> None:
        """The first so many tokens can be pulled."""
        self.num_ready_tokens = max(self.num_ready_tokens, num_ready_tokens)
        self.progress.set()

    def hand_over(self, done: pb.PrefillDone) -> None:
        """The prompt is complete; the first token is out."""
        if self.done is None:
            self.done = done
            self.stream.begin(done)
            self.progress.set()

    def stop(self, reason: FarspanError) -> None:
        """End it for this reason, in whatever state; the first reason counts."""
        if not self.stopped.done():
            self.stopped.set_result(reason)
