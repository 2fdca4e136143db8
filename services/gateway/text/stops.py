"""Cuts an answer at the first stop string, wherever the chunks of text happen to end.

Knows text only. A suffix that could still become a stop string is held back, and nothing more than
that.
"""

from collections.abc import Sequence


class StopScanner:
    """Passes text through until one of the stop strings completes, however it is chunked.

    The stop that completes first wins; of several that complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first_characters = {stop[0] for stop in stops}
        self._longest_prefix_len = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.stopped_by: str | None = None  # the stop string that was found

    def feed(self, text: str) -> str:
        """What is surely no part of a stop string; nothing once a stop was found."""
        if self.stopped_by is not None or not self._stops:
            return "" if self.stopped_by is not None else text
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        pending = self._held + text
        found = self._first_stop(pending)
        if found is not None:
            start, self.stopped_by = found
            self._held = ""
            return pending[:start]
        keep_from = self._first_possible_stop(pending)
        self._held = pending[keep_from:]
        return pending[:keep_from]

    def flush(self) -> str:
        """The text still held, at the end of the answer: no stop string can complete any more."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, pending: str) -> tuple[int, str] | None:
        """Where the winning stop string starts in pending, and which it is."""
        found = [(pending.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        return min(ends)[1:] if ends else None

    def _first_possible_stop(self, pending: str) -> int:
        """Where the longest suffix starts that is the beginning of some stop string."""
        for start in range(max(0, len(pending) - self._longest_prefix_len), len(pending)):
            if pending[start] in self._first_characters:
                suffix = pending[start:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return start
        return len(pending)
