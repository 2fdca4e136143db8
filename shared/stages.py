"""What a request did on one worker and when, told with its tokens: for people to read."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shared import farspan_pb2 as pb

_MOST = 64  # a prompt of a million tokens has a thousand chunks


class Stage:
    """A stage in progress."""

    def __init__(self, stages: "Stages", name: str) -> None:
        self._stages = stages
        self._told = pb.Stage(name=name, begin_unix_us=_now_us())

    def end(self, num_tokens: int = 0) -> None:
        """It is over; num_tokens were computed, pulled or generated in it."""
        self._told.end_unix_us = _now_us()
        self._told.num_tokens = num_tokens
        self._stages.add(self._told)


class Stages:
    """One request's, in the order of their ends."""

    def __init__(self) -> None:
        self.told: list[pb.Stage] = []

    def begin(self, name: str) -> Stage:
        """A stage begins; it is told once it has ended."""
        return Stage(self, name)

    @contextmanager
    def stage(self, name: str, num_tokens: int = 0) -> Iterator[None]:
        """The block, if nothing is raised in it."""
        begun = self.begin(name)
        yield
        begun.end(num_tokens)

    def add(self, ended: pb.Stage) -> None:
        """Tell it; beyond what fits in a message, like stages in a row become one."""
        last = self.told[-1] if self.told else None
        if len(self.told) >= _MOST and last is not None and last.name == ended.name:
            last.end_unix_us = ended.end_unix_us
            last.num_tokens += ended.num_tokens
        else:
            self.told.append(ended)


def _now_us() -> int:
    return time.time_ns() // 1000
