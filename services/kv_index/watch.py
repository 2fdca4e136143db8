"""Workers that the index cannot see, or must not trust: mute, not adding up, or out of time.

Pure: the caller gives the time and tells what it has seen; the log lines are written here, once
for each life.
"""

import logging
from collections.abc import Container
from datetime import UTC, datetime
from typing import NamedTuple

from services.kv_index.events import Life

logger = logging.getLogger(__name__)


class _Silence(NamedTuple):
    """A life works, and no block of it is known."""

    since_s: float
    is_told: bool  # for so long that it was reported


class _Shadow(NamedTuple):
    """A life that is past goes on as if it were not."""

    since_s: float
    heard_s: float
    is_told: bool


class Watch:
    """Who ought to be in the index and is not, or contradicts himself."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._silences: dict[Life, _Silence] = {}
        self._doubted: set[Life] = set()
        self._shadows: dict[Life, _Shadow] = {}
        self._ahead_s: dict[Life, float] = {}  # when last heard of

    @property
    def counts(self) -> dict[str, int]:
        """For the metrics."""
        return {
            "mute_workers": sum(silence.is_told for silence in self._silences.values()),
            "doubted_workers": len(self._doubted),
            "shadowed_workers": sum(shadow.is_told for shadow in self._shadows.values()),
            "ahead_workers": len(self._ahead_s),
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

    def note_shadowed(self, life: Life, past_epoch: int, now_s: float) -> None:
        """A ready worker's heartbeat in a life that is past, as are all up to `past_epoch`."""
        since_s, _, is_told = self._shadows.get(life, _Shadow(now_s, now_s, False))
        if not is_told and now_s - since_s >= self._grace_s:
            is_told = True
            logger.error(
                "worker %s is ready and not followed: it began at %s by its clock, and what began"
                " up to %s is over. Its clock went back, or two workers have its id: start it again"
                " when its clock is past that, or with another id",
                life.worker_id,
                _moment(life.epoch),
                _moment(past_epoch),
            )
        self._shadows[life] = _Shadow(since_s, now_s, is_told)

    def note_ahead(self, life: Life, now_s: float) -> None:
        """A message of a life that begins in the far future."""
        if life not in self._ahead_s:
            logger.error(
                "worker %s is not believed: its epoch is %s, more than a day ahead of this clock."
                " Start it again when both clocks are right",
                life.worker_id,
                _moment(life.epoch),
            )
        self._ahead_s[life] = now_s

    def keep(self, followed: Container[Life], now_s: float) -> None:
        """Forget silences of lives that are not followed, and others when they fall silent."""
        oldest_s = now_s - self._grace_s
        self._silences = {life: each for life, each in self._silences.items() if life in followed}
        self._shadows = {
            life: shadow
            for life, shadow in self._shadows.items()
            if life not in followed and shadow.heard_s >= oldest_s
        }
        self._ahead_s = {
            life: heard_s for life, heard_s in self._ahead_s.items() if heard_s >= oldest_s
        }


def _moment(epoch: int) -> str:
    return datetime.fromtimestamp(epoch // 10**9, UTC).isoformat()
