"""Whether this router hears its fleet. Silence proves nothing to who is deaf."""

import time

from shared.bus import Bus

# Workers speak twice a second. Who hears none of them, nor any gateway, for so long is deaf itself:
# its process stood still, or NATS did; unless NATS answers all the while.
_DEAF_S = 2.0
_ANSWER_S = 0.2


class Hearing:
    """When anybody was heard; asked in regular steps."""

    def __init__(self, bus: Bus, step_s: float, silence_s: float) -> None:
        self._bus = bus
        self._most_silent = silence_s / step_s
        self._heard_s = time.monotonic()
        self._num_silent = 0  # looks at a NATS that answers and brings no word of anybody

    def note(self) -> None:
        """Somebody spoke."""
        self._heard_s = time.monotonic()

    async def is_lost(self) -> bool:
        """Whether it is we who hear nobody, and not they who are silent."""
        if not self._bus.is_connected:
            self._num_silent = 0
            return True
        if time.monotonic() - self._heard_s <= _DEAF_S:
            self._num_silent = 0
            return False
        # Counted, not measured: while this process stands still nothing is counted.
        answers = await self._bus.answers(_ANSWER_S)
        self._num_silent = self._num_silent + 1 if answers else 0
        return self._num_silent < self._most_silent
