"""How fast this worker computes, over its last minute of work."""

from collections import deque

_WINDOW_S = 60.0


class Throughput:
    """Tokens per second of the steps that make up the last minute of work; idle time is none."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque()
        self._tokens = 0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 until something was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def step_s(self) -> float:
        """How long a step took on average; 0 until something was measured."""
        return self._seconds / len(self._steps) if self._steps else 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._steps.append((num_tokens, seconds))
        self._tokens += num_tokens
        self._seconds += seconds
        while len(self._steps) > 1 and self._seconds - self._steps[0][1] >= _WINDOW_S:
            tokens, taken_s = self._steps.popleft()
            self._tokens -= tokens
            self._seconds -= taken_s
