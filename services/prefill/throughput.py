"""How fast this worker computes, over its last minute of work."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 60.0
_MOST_STEPS = 512  # enough for medians; short steps would be thousands
_SHORTEST_S = 1e-9  # what a clock may tell of a step is nothing


class Throughput:
    """Of the steps that make up the last minute of work; idle time is none.

    Medians: a step during which the machine stood still says nothing about the next one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque()
        self._seconds = 0.0
        self._last_at_s = 0.0
        self._figures: tuple[float, float] | None = (0.0, 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Half of the tokens were computed at this speed or faster; 0 until it was measured."""
        return self._measured()[0]

    @property
    def step_s(self) -> float:
        """Half of the steps took so long or longer; 0 until something was measured."""
        return self._measured()[1]

    @property
    def age_s(self) -> float:
        """Since the last step; 0 until there was one."""
        return self._clock() - self._last_at_s if self._steps else 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._steps.append((num_tokens, max(seconds, _SHORTEST_S)))
        self._seconds += self._steps[-1][1]
        while len(self._steps) > _MOST_STEPS or (
            len(self._steps) > 1 and self._seconds - self._steps[0][1] >= _WINDOW_S
        ):
            self._seconds -= self._steps.popleft()[1]
        self._last_at_s = self._clock()
        self._figures = None

    def _measured(self) -> tuple[float, float]:
        if self._figures is None:
            durations = sorted(seconds for _, seconds in self._steps)
            fastest = sorted(self._steps, key=lambda step: step[1] / step[0])
            left = sum(tokens for tokens, _ in fastest) / 2
            for tokens, seconds in fastest:
                left -= tokens
                if left <= 0:
                    self._figures = (tokens / seconds, durations[len(durations) // 2])
                    break
        assert self._figures is not None, "some step holds the middle token"
        return self._figures
