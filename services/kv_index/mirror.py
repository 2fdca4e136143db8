"""Keeps the Redis copy close behind the index, without ever making the index wait.

While Redis is away nothing queues up: who changed is noted, and written whole when it is back. A
comparison of sequences and numbers of blocks, after every failure and now and then, finds the
workers whose copy has fallen behind or lost keys all the same; they are written whole too.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress

from services.kv_index.events import End, Life
from services.kv_index.holdings import Delta, Extent
from services.kv_index.index import MAX_OVER, Index
from services.kv_index.store import Store, StoreAway

logger = logging.getLogger(__name__)

_MAX_WAITING = 1024  # deltas; beyond it, writing whole lives is cheaper than catching up
_RETRY_S = 0.5
_NOTHING = Extent(-1, 0)


class Mirror:
    """The write-behind copier. Used on one event loop; `run` is its only writer to the store."""

    def __init__(self, index: Index, store: Store, *, check_interval_s: float) -> None:
        self._index = index
        self._store = store
        self._check_interval_s = check_interval_s
        self._waiting: deque[Delta] = deque()
        self._retired: deque[Life] = deque()
        self._behind: set[Life] = set()
        self._over: set[Life] = set()  # not yet in the copy
        self._work = asyncio.Event()
        self._next_check_s = 0.0
        self._away_reason = ""

    @property
    def away_reason(self) -> str:
        """Why the copy is not being written; empty when all is well."""
        return self._away_reason

    def append(self, delta: Delta | None) -> None:
        """Write this step soon; None, a step that changed nothing, is ignored."""
        if delta is None or delta.life in self._behind:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self._give_up_waiting()
            self._behind.add(delta.life)
        else:
            self._waiting.append(delta)
        self._work.set()

    def retire(self, life: Life) -> None:
        """Remove this life from the copy soon; what waits of it must not bring it back."""
        self._waiting = deque(delta for delta in self._waiting if delta.life != life)
        self._behind.discard(life)
        self._retired.append(life)
        self._work.set()

    def note_over(self, life: Life) -> None:
        """This life is over for good: no replica, now or later, may follow it."""
        self._over.add(life)
        self._work.set()

    def note_away(self, reason: str) -> None:
        """Redis does not answer: nothing queues up, and the copy is compared when it does."""
        self._give_up_waiting()
        self._over.clear()
        self._next_check_s = 0.0
        if not self._away_reason:
            logger.error("Redis is away, serving from memory: %s", reason)
        self._away_reason = reason or "no reason given"

    async def run(self) -> None:
        """Write and compare for ever."""
        while True:
            try:
                if self._away_reason:
                    await self._store.extents([])  # whole lives are not gathered for nobody
                await self.write()
                await self._compare()
                self._note_back()
            except StoreAway as error:
                self.note_away(str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._check_interval_s):
                        await self._work.wait()

    async def write(self) -> None:
        """Write all that waits. Raises StoreAway."""
        self._work.clear()
        while True:
            if self._retired:
                await self._store.retire(self._retired[0])
                self._retired.popleft()
            elif self._over:
                await self._write_over()
            elif self._waiting:
                await self._write_step(self._waiting.popleft())
            elif self._behind:
                await self._write_whole(next(iter(self._behind)))
            else:
                return

    async def _write_over(self) -> None:
        lives, over = set(self._over), self._index.over
        await self._store.note_over({life: over[life] for life in lives if life in over})
        self._over -= lives

    async def _write_step(self, delta: Delta) -> None:
        if delta.life in self._behind:
            return
        try:
            is_behind = not await self._store.append(delta)
        except (StoreAway, asyncio.CancelledError):
            # A step that healed a drift keeps its sequence, so no comparison would miss it.
            self._behind.add(delta.life)
            raise
        if is_behind:
            self._behind.add(delta.life)

    async def _write_whole(self, life: Life) -> None:
        self._behind.discard(life)  # what comes while this is written waits as a step
        whole = self._index.whole(life)  # taken now, so it holds all that waited
        if whole is None:
            return
        try:
            await self._store.append(whole)
        except (StoreAway, asyncio.CancelledError):
            self._behind.add(life)
            raise

    def _give_up_waiting(self) -> None:
        """Their lives are written whole instead."""
        self._behind.update(delta.life for delta in self._waiting)
        self._waiting.clear()

    async def _compare(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_check_s:
            return
        written = self._index.extents  # right after a write: what comes meanwhile is not meant
        copied = await self._store.extents(written)
        self._behind.update(
            life for life, extent in written.items() if copied.get(life, _NOTHING) < extent
        )
        if self._behind:
            logger.info("writing %d workers whole: their copy was behind", len(self._behind))
        await self._agree_who_is_over()
        await self.write()
        self._next_check_s = now_s + self._check_interval_s

    async def _agree_who_is_over(self) -> None:
        """A goodbye, or a batch that is not understood, may reach one replica and not another."""
        copied = await self._store.over()
        known = self._index.over
        self._over.update(
            life for life, end in known.items() if copied.get(life) not in (end, End.STOPPED)
        )
        # No more than the index remembers: else the older and the newer drive one another out.
        for life, end in list(copied.items())[-MAX_OVER:]:
            is_more = end is End.STOPPED and self._index.is_refused(life)
            if is_more or not self._index.is_over(life):
                ended = self._index.retire(life, end)
                if ended is not None:
                    logger.warning("worker %s: another replica says %s", ended.worker_id, end)
                    self.retire(ended)

    def _note_back(self) -> None:
        if self._away_reason:
            logger.info("Redis is back and has caught up")
        self._away_reason = ""
