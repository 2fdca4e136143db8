"""Simulated time: what is to happen when, in order; at equal times, as it was asked for."""

import heapq
from collections.abc import Callable
from itertools import count


class Timeline:
    """A clock that jumps from one thing to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def clock(self) -> float:
        """The time now, for code that is given a clock."""
        return self.now_s

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something then."""
        heapq.heappush(self._heap, (time_s, next(self._order), action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Go on until it is over or nothing is left."""
        while self._heap and not is_over():
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
