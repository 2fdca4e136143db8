"""Workers that the index cannot see, or must not trust: mute, or not adding up.

Pure: the caller gives the time and tells what it has seen; the log lines are written here, once
for each life.
"""

import logging
from collections.abc import Container
from typing import NamedTuple

from services.kv_index.events import Life

logger = logging.getLogger(__name__)


class _Silence(NamedTuple):
    """A life works, and no block of it is known."""

    since_s: float
    is_told: bool  # for so long that it was reported


class Watch:
    """Who ought to be in the index and is not, or contradicts himself."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._silences: dict[Life, _Silence] = {}
        self._doubted: set[Life] = set()

    @property
    def counts(self) -> dict[str, int]:
        """For the metrics."""
        return {
            "mute_workers": sum(silence.is_told for silence in self._silences.values()),
            "doubted_workers": len(self._doubted),
        }

    def note(self, life: Life, *, is_working: bool, is_known: bool, now_s: float) -> None:
        """A current life's heartbeat: is it working, and has any batch of it been followed?"""
        silence = self._silences.get(life)
        if is_known:
            self._silences.pop(life, None)
        if is_known or not (is_working or silence):
            return
        since_s, is_told = (silence.since_s, silence.is_told) if silence else (now_s, False)
        if not is_told and now_s - since_s >= self._grace_s:
            is_told = True
            logger.error(
                "worker %s has worked for %.0f s and published no block: the router is blind to it",
                life.worker_id,
                now_s - since_s,
            )
        self._silences[life] = _Silence(since_s, is_told)

    def note_doubted(self, doubted: set[Life]) -> None:
        """These lives' digests disagree with their own snapshots."""
        for life in doubted - self._doubted:
            logger.error("worker %s: its digest disagrees with its snapshot", life.worker_id)
        self._doubted = doubted

    def keep(self, lives: Container[Life]) -> None:
        """There is nothing to be told about others any more: they are over."""
        self._silences = {life: each for life, each in self._silences.items() if life in lives}
