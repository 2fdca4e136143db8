"""When a process of the stack that ended by itself is started again, and when no more. Pure."""

from collections.abc import Sequence

MAX_DEATHS = 5
WINDOW_S = 60.0
_FIRST_PAUSE_S = 0.5


def pause_s(deaths_s: Sequence[float]) -> float | None:
    """How long to wait after the last of a process's deaths; None to give up.

    Each death within the window doubles the pause, and MAX_DEATHS of them are the end.
    """
    num_recent = sum(death_s > deaths_s[-1] - WINDOW_S for death_s in deaths_s)
    if num_recent >= MAX_DEATHS:
        return None
    return float(_FIRST_PAUSE_S * 2 ** (num_recent - 1))
