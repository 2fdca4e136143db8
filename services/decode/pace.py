"""How many tokens a second the steps give, over the last minute of work. Pure arithmetic."""

from collections import deque

_WINDOW_S = 60.0


class Pace:
    """A sliding sum over steps; idle time does not count."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque()
        self._num_tokens = 0
        self._busy_s = 0.0

    def note(self, num_tokens: int, duration_s: float) -> None:
        """Count a step."""
        self._steps.append((num_tokens, duration_s))
        self._num_tokens += num_tokens
        self._busy_s += duration_s
        while self._busy_s > _WINDOW_S and len(self._steps) > 1:
            tokens, seconds = self._steps.popleft()
            self._num_tokens -= tokens
            self._busy_s -= seconds

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        return self._num_tokens / self._busy_s if self._busy_s > 0 else 0.0
