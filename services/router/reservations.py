"""Promises that all routers share: each is made in the ledger with the decision, and ended there.

Routers that decide at once decide as one router would: a decision made without knowing another's
promise is not written, and is made again. While Redis is away each router goes on with what it
knows and promises; it tells the ledger later.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from services.router.ledger import MAX_ENDED, Entry, Ledger, LedgerAway, News
from services.router.policy import Decision
from services.router.promises import Promise, Promises, prefix_s
from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS
from shared.errors import Overloaded

logger = logging.getLogger(__name__)

_STEP_S = 0.25  # what others do is heard this often when there is nothing to decide
_RETRY_S = 0.5
_GATHER_S = 0.02  # ends are told together, or with the next promise
_CONFLICT_S = 1.0  # the gateway asks again after two
_PATIENCE = 3  # decisions lost to other routers before this one insists on a turn
_TURN_S = 0.002
_BATCH = 16  # promises told in one step: with their hashes they may be 4 MB
_MAX_ENDED = 100_000  # kept for Redis to come back; what is beyond ends with its lease


class Reservations:
    """One router's promises and its part in the ledger; without one they are its own alone."""

    def __init__(
        self, promises: Promises, ledger: Ledger | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_conflicts = 0  # decisions made again because another router was faster
        self.num_unshared = 0  # promises made while Redis was away
        self.away_reason = ""
        self._promises = promises
        self._ledger = ledger
        self._clock = clock
        self._turn = asyncio.Lock()
        self._untold: set[str] = set()  # own promises the ledger does not hold
        self._ended: dict[str, None] = {}  # to be ended there
        self._work = asyncio.Event()

    async def reserve(
        self, request: pb.PlaceRequest, lifetime_s: float, decide: Callable[[], Decision]
    ) -> Decision:
        """A decision, promised here and in the ledger.

        Raises what `decide` raises, and Overloaded if other routers were faster for a whole second.
        """
        async with self._turn:
            give_up_s = self._clock() + _CONFLICT_S
            for num_lost in itertools.count():
                decision = decide()
                promise = self._promises.make(request, decision, lifetime_s)
                if await self._is_told(promise, decision, num_lost > _PATIENCE):
                    return decision
                self._promises.withdraw(promise.request_id)
                self._untold.discard(promise.request_id)
                self.num_conflicts += 1
                if self._clock() > give_up_s:
                    break
                if num_lost > _PATIENCE:
                    await asyncio.sleep(_TURN_S)  # it may be another's turn
            raise Overloaded("the routers could not agree in time")

    def end(self, request_id: str) -> None:
        """The request is over: its promise goes, here and in the ledger."""
        self._promises.end(request_id)
        self._untold.discard(request_id)
        if self._ledger is not None and len(self._ended) < _MAX_ENDED:
            self._ended[request_id] = None
            self._work.set()

    async def open(self) -> None:
        """Learn what is promised already; a Redis that is away is told and waited for later."""
        if self._ledger is not None:
            async with self._turn:
                await self._exchange(self._ledger)

    async def close(self) -> None:
        """Tell the ledger of the last ends, unless it is away: then they end with their leases."""
        while self._ledger is not None and self._ended and not self.away_reason:
            async with self._turn:
                await self._exchange(self._ledger)

    async def run(self) -> None:
        """For ever end promises in the ledger, and hear what others do."""
        if self._ledger is None:
            return
        while True:
            self._work.clear()
            async with self._turn:
                await self._exchange(self._ledger)
            if self.away_reason:
                await asyncio.sleep(_RETRY_S)
            elif not self._untold:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_STEP_S):
                        await self._work.wait()
                await asyncio.sleep(_GATHER_S)

    async def _is_told(self, promise: Promise, decision: Decision, is_insisting: bool) -> bool:
        """False if others have promised something that this decision did not know."""
        if self._ledger is None or self._promises.has_ended(promise.request_id):
            return True
        if not self.away_reason:
            ended = list(self._ended)[:MAX_ENDED]
            try:
                news = await self._ledger.make(
                    _entry(promise),
                    ended,
                    num_hit_blocks=decision.placement.prefill_hit_tokens // BLOCK_TOKENS,
                    is_insisting=is_insisting,
                )
            except LedgerAway as error:
                self._note_away(str(error))
            else:
                self._forget_ended(ended)
                self._take_in(news)
                return news.is_written
        self.num_unshared += 1
        self._untold.add(promise.request_id)
        return True

    async def _exchange(self, ledger: Ledger) -> None:
        ended = list(self._ended)[:MAX_ENDED]
        untold = [self._promises.get(request_id) for request_id in list(self._untold)[:_BATCH]]
        told = [promise for promise in untold if promise is not None]
        self._untold.intersection_update(self._promises.open_ids)
        try:
            news = await ledger.exchange([_entry(promise) for promise in told], ended)
        except LedgerAway as error:
            self._note_away(str(error))
            return
        self._forget_ended(ended)
        self._untold.difference_update(promise.request_id for promise in told)
        self._take_in(news, just_told=[promise.request_id for promise in told])
        self._note_back()

    def _forget_ended(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._ended.pop(request_id, None)

    def _take_in(self, news: News, just_told: Sequence[str] = ()) -> None:
        """Follow the others. What Redis has lost of ours is told again."""
        if news.is_whole:
            held = {change.request_id for change in news.changes if isinstance(change, Entry)}
            for promise in self._promises:
                if promise.request_id in held or promise.request_id in just_told:
                    continue
                if promise.is_own and (news.is_new_life or promise.request_id in self._untold):
                    self._untold.add(promise.request_id)
                else:
                    self._promises.withdraw(promise.request_id)
        for change in news.changes:
            if isinstance(change, str):
                self._promises.withdraw(change)
            elif change.request_id not in self._promises:
                self._promises.put(self._promise(change))

    def _promise(self, entry: Entry) -> Promise:
        made_s = self._clock() - entry.age_s
        return Promise(
            entry.request_id, entry.reservation, entry.block_hashes, made_s, is_own=False
        )

    def _note_away(self, reason: str) -> None:
        if not self.away_reason:
            logger.error("Redis is away, placing by this router's own promises: %s", reason)
        self.away_reason = reason

    def _note_back(self) -> None:
        if self.away_reason:
            logger.info("Redis is back, promises are shared again")
        self.away_reason = ""


def _entry(promise: Promise) -> Entry:
    return Entry(
        promise.request_id,
        promise.reservation,
        promise.block_hashes,
        prefix_s=prefix_s(promise.reservation),
    )
