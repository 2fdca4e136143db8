"""Asks workers for what the index has missed: lost batches, or a snapshot.

One task a life at most. Knows the bus and the index; what is applied goes to the mirror too.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.kv_index import events
from services.kv_index.events import Life
from services.kv_index.index import Index
from services.kv_index.mirror import Mirror
from shared import farspan_pb2 as pb
from shared import subjects, tasks
from shared.bus import Bus
from shared.errors import BadRequest, FarspanError

logger = logging.getLogger(__name__)

_REPLAY_TIMEOUT_S = 5.0  # a snapshot of a million blocks is 16 MB
_ANY_SEQUENCE = 0  # asks for a snapshot
# Drift or a gap that a snapshot did not end brings another after so long, then twice as long, and
# so on: a worker that makes wrong claims must cost little, one that drifts again must be healed.
_AGAIN_S = 1.0
_MAX_AGAIN_S = 60.0


def pause_s(num_heals: int) -> float:
    """How long to ask for no snapshot because of what so many of them have not ended."""
    if not num_heals:
        return 0.0
    return min(_AGAIN_S * 2.0 ** min(num_heals - 1, 16), _MAX_AGAIN_S)


@dataclass
class _Past:
    """What was done about a life."""

    missing: int | None = None  # where its last gap began
    snapshot_s: float = -math.inf  # when its last snapshot came


class Repairs:
    """The repairs in progress. Used on one event loop."""

    def __init__(
        self,
        bus: Bus,
        index: Index,
        mirror: Mirror,
        refuse: Callable[[Life, BadRequest], None],  # told of answers that are not understood
    ) -> None:
        self._bus = bus
        self._index = index
        self._mirror = mirror
        self._refuse = refuse
        self._running: dict[Life, asyncio.Task[None]] = {}
        self._past: dict[Life, _Past] = {}
        self.counts = Counter(gaps_total=0, drifts_total=0, replays_total=0, snapshots_total=0)

    def begin_if_needed(self, life: Life) -> None:
        """Repair a life in the background, unless that is under way."""
        if life in self._running:
            return
        first = self._index.first_missing(life)
        if first is not None or self._is_to_heal(life) or self._index.is_cut(life):
            past = self._past_of(life)
            if first is not None and first != past.missing:  # else it is tried again
                past.missing = first
                self.counts["gaps_total"] += 1
            task = asyncio.create_task(self._repair(life))
            self._running[life] = task
            task.add_done_callback(lambda _: self._running.pop(life, None))

    async def stop(self) -> None:
        """Give up what runs; the next process starts it again."""
        await tasks.finish(list(self._running.values()), grace_s=0)

    async def _repair(self, life: Life) -> None:
        """Ask for what is missing until nothing is. On failure the next heartbeat begins anew."""
        try:
            while (first := self._index.first_missing(life)) is not None:
                await self._ask(life, first)
                if self._index.first_missing(life) == first:
                    if not self._is_time(life):
                        return
                    await self._ask(life, _ANY_SEQUENCE)
                    if self._index.first_missing(life) == first:
                        logger.error("worker %s does not replay %d", life.worker_id, first)
                        return
            if self._is_to_heal(life):
                await self._heal(life)
            elif self._index.is_cut(life):
                await self._ask(life, _ANY_SEQUENCE)
        except BadRequest as error:
            self._refuse(life, error)
        except FarspanError as error:
            logger.warning("no replay from worker %s: %s", life.worker_id, error)

    def _is_to_heal(self, life: Life) -> bool:
        """Whether a life has drifted, and it is time to do something about it."""
        return self._index.is_drifted(life) and self._is_time(life)

    def _is_time(self, life: Life) -> bool:
        """Whether snapshots that did not end what they were asked for are long enough ago."""
        pause = pause_s(self._index.num_heals(life))
        return time.monotonic() - self._past_of(life).snapshot_s >= pause

    def _past_of(self, life: Life) -> _Past:
        past = self._past.get(life)
        if past is None:
            known = self._index.sequences
            self._past = {each: past for each, past in self._past.items() if each in known}
            past = self._past[life] = _Past()
        return past

    async def _heal(self, life: Life) -> None:
        self.counts["drifts_total"] += 1
        logger.error("worker %s holds other blocks than is known", life.worker_id)
        await self._ask(life, _ANY_SEQUENCE)

    async def _ask(self, life: Life, from_sequence: int) -> None:
        worker = pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch)
        request = pb.ReplayRequest(worker=worker, from_sequence=from_sequence)
        reply = await self._bus.request(
            subjects.REPLAY, request, timeout_s=_REPLAY_TIMEOUT_S, worker=life.worker_id
        )
        is_snapshot = reply.HasField("snapshot")
        self.counts["snapshots_total" if is_snapshot else "replays_total"] += 1
        logger.info(
            "worker %s from %d: %s",
            life.worker_id,
            from_sequence,
            "snapshot" if is_snapshot else f"{len(reply.batches)} batches replayed",
        )
        if is_snapshot:
            self._past_of(life).snapshot_s = time.monotonic()
            changes = events.snapshot_changes(reply.snapshot)
            self._mirror.append(self._index.restore(life, reply.snapshot.sequence, changes))
        for batch in reply.batches:
            self._mirror.append(self._index.apply(batch))
