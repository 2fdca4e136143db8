"""Which gateways still speak. One that is gone ends none of its requests, so others must.

Knows time only through the clock it is given.
"""

from collections.abc import Callable, Iterable


class Gateways:
    """When each gateway was last heard of. An id stands for one life of a gateway."""

    def __init__(self, clock: Callable[[], float], silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._heard_s: dict[str, float] = {}
        self._excused_at_s = clock()  # before that we heard nobody

    def hear(self, gateway_id: str) -> None:
        """It lives."""
        self._heard_s[gateway_id] = self._clock()

    def excuse_silence(self) -> None:
        """Count silence from now on: it was we who could not hear."""
        self._excused_at_s = self._clock()

    def gone(self, gateway_ids: Iterable[str]) -> set[str]:
        """Those of them that are silent; what is not asked for and silent is forgotten."""
        silent_since_s = self._clock() - self._silence_s
        self._heard_s = {
            gateway_id: heard_s
            for gateway_id, heard_s in self._heard_s.items()
            if heard_s >= silent_since_s
        }
        if self._excused_at_s > silent_since_s:
            return set()
        return set(gateway_ids) - self._heard_s.keys() - {""}
