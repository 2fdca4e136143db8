"""Threads for what would hold up the event loop: parsing, tokenising, grammars, long documents.

Shared out so that nobody's megabytes keep others waiting: small work has threads of its own, and of
the others each tenant has at most half. What nobody waits for any more is given up.
"""

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from services.gateway.wanted import given_up

T = TypeVar("T")

SMALL_BYTES = 64 << 10  # of a body: its work takes some 30 ms
_NUM_SMALL = 2


class Workshop:
    """Use `run` inside its `async with`, on one event loop."""

    def __init__(self) -> None:
        num_large = max(2, os.cpu_count() or 1)
        self._share = max(1, num_large // 2)
        self._small = ThreadPoolExecutor(_NUM_SMALL, "small")
        self._large = ThreadPoolExecutor(num_large, "large")
        # Of tenants, as many as the keys' file has; without keys everybody is one.
        self._turns = {"": asyncio.Semaphore(num_large)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, tenant: str, num_bytes: int, work: Callable[..., T], *given: Any) -> T:
        """What `work` gives for a tenant's body of so many bytes. A cancelled caller is not waited
        for: the work is told so where it calls `check_wanted`.
        """
        if num_bytes < SMALL_BYTES:
            return await self._run(self._small, work, given)
        turn = self._turns.setdefault(tenant, asyncio.Semaphore(self._share))
        async with turn:
            return await self._run(self._large, work, given)

    async def _run(
        self, pool: ThreadPoolExecutor, work: Callable[..., T], given: tuple[Any, ...]
    ) -> T:
        unwanted = threading.Event()
        context = contextvars.copy_context()
        context.run(given_up.set, unwanted)
        try:
            return await asyncio.wrap_future(pool.submit(context.run, work, *given))
        except asyncio.CancelledError:
            unwanted.set()
            raise
