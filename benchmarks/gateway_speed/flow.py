"""What client and mocks share while they measure: one clock, and how far the client has come.

A mock that is faster than what it measures would send all its tokens into buffers at once, and the
drain of a buffer is cheaper than a stream. So it never runs more than a few steps ahead of what
the client has received, as a decode worker does not.
"""

import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")
STEPS_AHEAD = 16


def now_s() -> float:
    """Seconds of the clock that all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _counter() -> "Synchronized[int]":
    return CONTEXT.Value("q", 0, lock=False)


@dataclass
class Flow:
    """Written by the client alone; given to processes when they start."""

    received: Any = field(default_factory=_counter)  # tokens that the client has

    def note(self, num_tokens: int) -> None:
        """The client has received so many more."""
        self.received.value += num_tokens

    def has_room(self, num_sent: int, num_streams: int) -> bool:
        """Whether a mock may send one more token to each stream."""
        return num_sent - self.received.value < STEPS_AHEAD * num_streams
