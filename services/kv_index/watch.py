"""Workers that the index must not trust, or cannot see: refused, blind, or not adding up.

Pure: the caller gives the time and tells what it has seen; the log lines are written here, once
for each life.
"""

import logging

from services.kv_index.events import Life

logger = logging.getLogger(__name__)


class Watch:
    """Who is left out of the index, and who ought to be in it and is not."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._refused: dict[str, int] = {}  # worker id -> the epoch that is left out
        self._working_since_s: dict[Life, float] = {}
        self._mute: set[Life] = set()
        self._doubted: set[Life] = set()
        self.num_refused = 0

    @property
    def counts(self) -> dict[str, int]:
        """For the metrics."""
        return {
            "refused_total": self.num_refused,
            "refused_workers": len(self._refused),
            "mute_workers": len(self._mute),
            "doubted_workers": len(self._doubted),
        }

    def refuse(self, life: Life, reason: str) -> None:
        """Leave a life out from now on: an event that is not understood may have removed blocks."""
        logger.error("worker %s is left out until it starts again: %s", life.worker_id, reason)
        self._refused[life.worker_id] = life.epoch
        self.num_refused += 1

    def is_refused(self, life: Life) -> bool:
        """Whether a life is left out; each message of it counts."""
        is_refused = self._refused.get(life.worker_id) == life.epoch
        self.num_refused += is_refused
        return is_refused

    def note(self, life: Life, *, is_working: bool, is_known: bool, now_s: float) -> None:
        """A heartbeat: is it working, and has any batch of its events been followed?"""
        if is_known or life in self._mute:
            if is_known:
                self._working_since_s.pop(life, None)
                self._mute.discard(life)
            return
        if is_working:
            self._working_since_s.setdefault(life, now_s)
        since_s = self._working_since_s.get(life, now_s)
        if now_s - since_s >= self._grace_s:
            self._mute.add(life)
            logger.error(
                "worker %s has worked for %.0f s and published no block: the router is blind to it",
                life.worker_id,
                now_s - since_s,
            )

    def note_doubted(self, doubted: set[Life]) -> None:
        """These lives' digests disagree with their own snapshots."""
        for life in doubted - self._doubted:
            logger.error("worker %s: its digest disagrees with its snapshot", life.worker_id)
        self._doubted = doubted

    def forget(self, life: Life) -> None:
        """A life is over. A refused one stays refused: messages of it may be on the way."""
        self._working_since_s.pop(life, None)
        self._mute.discard(life)
