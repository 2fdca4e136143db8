"""Workers that the index must not trust, or cannot see: refused, blind, or not adding up.

Pure: the caller gives the time and tells what it has seen; the log lines are written here, once
for each life.
"""

import logging
import math
from typing import NamedTuple

from services.kv_index.events import Life

logger = logging.getLogger(__name__)


class _Silence(NamedTuple):
    """A life works, and no block of it is known."""

    epoch: int
    since_s: float
    is_told: bool  # for so long that it was reported


class Watch:
    """Who is left out of the index, and who ought to be in it and is not."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._refused: dict[str, int] = {}  # worker id -> the epoch that is left out
        self._silences: dict[str, _Silence] = {}  # by worker id, so a restart ends its last one
        self._doubted: set[Life] = set()
        self.num_refused = 0

    @property
    def counts(self) -> dict[str, int]:
        """For the metrics."""
        return {
            "refused_total": self.num_refused,
            "refused_workers": len(self._refused),
            "mute_workers": sum(silence.is_told for silence in self._silences.values()),
            "doubted_workers": len(self._doubted),
        }

    @property
    def refused(self) -> set[Life]:
        """Lives that are left out."""
        return {Life(worker_id, epoch) for worker_id, epoch in self._refused.items()}

    def refuse(self, life: Life, reason: str) -> None:
        """Leave a life out from now on: an event that is not understood may have removed blocks."""
        logger.error("worker %s is left out until it starts again: %s", life.worker_id, reason)
        self._refused[life.worker_id] = life.epoch
        self.num_refused += 1

    def is_refused(self, life: Life) -> bool:
        """Whether a life is left out; each message of it counts, one of a later life ends it."""
        epoch = self._refused.get(life.worker_id)
        if epoch is not None and epoch < life.epoch:
            del self._refused[life.worker_id]
        self.num_refused += epoch == life.epoch
        return epoch == life.epoch

    def note(self, life: Life, *, is_working: bool, is_known: bool, now_s: float) -> None:
        """A current life's heartbeat: is it working, and has any batch of it been followed?"""
        silence = self._silences.get(life.worker_id)
        if is_known or (silence is not None and silence.epoch != life.epoch):
            self._silences.pop(life.worker_id, None)
            silence = None
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
        self._silences[life.worker_id] = _Silence(life.epoch, since_s, is_told)

    def note_doubted(self, doubted: set[Life]) -> None:
        """These lives' digests disagree with their own snapshots."""
        for life in doubted - self._doubted:
            logger.error("worker %s: its digest disagrees with its snapshot", life.worker_id)
        self._doubted = doubted

    def forget(self, life: Life) -> None:
        """A life and those before it are over: there is nothing to be told about them any more."""
        if self._refused.get(life.worker_id, math.inf) <= life.epoch:
            del self._refused[life.worker_id]
        silence = self._silences.get(life.worker_id)
        if silence is not None and silence.epoch <= life.epoch:
            del self._silences[life.worker_id]
