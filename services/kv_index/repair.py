"""Asks workers for what the index has missed: lost batches, or a snapshot.

One task a life at most. Knows the bus and the index; what is applied goes to the mirror too.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable

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
# Drift that a snapshot did not end is healed again after so long, then twice as long, and so on:
# a worker that computes its digest wrongly must cost little, one that drifts again must be healed.
_AGAIN_S = 1.0
_MAX_AGAIN_S = 60.0


def pause_s(num_heals: int) -> float:
    """How long to leave a drift alone that so many snapshots have not ended."""
    if not num_heals:
        return 0.0
    return min(_AGAIN_S * 2.0 ** min(num_heals - 1, 16), _MAX_AGAIN_S)


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
        self._healed_s: dict[Life, float] = {}  # when a drift was last healed
        self.counts = Counter(gaps_total=0, drifts_total=0, replays_total=0, snapshots_total=0)

    def begin_if_needed(self, life: Life) -> None:
        """Repair a life in the background, unless that is under way."""
        index = self._index
        if life in self._running:
            return
        has_gap = index.first_missing(life) is not None
        if has_gap or self._is_to_heal(life) or index.is_cut(life):
            self.counts["gaps_total"] += has_gap
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
        if not self._index.is_drifted(life):
            return False
        healed_s = self._healed_s.get(life, -math.inf)
        return time.monotonic() - healed_s >= pause_s(self._index.num_heals(life))

    async def _heal(self, life: Life) -> None:
        self.counts["drifts_total"] += 1
        logger.error("worker %s holds other blocks than is known", life.worker_id)
        await self._ask(life, _ANY_SEQUENCE)
        known = self._index.sequences
        self._healed_s = {each: at_s for each, at_s in self._healed_s.items() if each in known}
        self._healed_s[life] = time.monotonic()

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
            changes = events.snapshot_changes(reply.snapshot)
            self._mirror.append(self._index.restore(life, reply.snapshot.sequence, changes))
        for batch in reply.batches:
            self._mirror.append(self._index.apply(batch))
