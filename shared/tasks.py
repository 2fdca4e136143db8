"""Tasks beside the main one: none is forgotten, and none fails unseen."""

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

_Value = TypeVar("_Value")


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless work beside the block; should one fail, the block is cancelled with its error."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def finish(running: Collection[asyncio.Task[None]], grace_s: float) -> None:
    """Return when all have ended; those that are not done after grace_s are cancelled."""
    if not running:
        return
    _, late = await asyncio.wait(running, timeout=grace_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


@asynccontextmanager
async def entered_aside(manager: AbstractContextManager[_Value]) -> AsyncIterator[_Value]:
    """Enter and leave it on other threads, since both take long; it is not told of errors.

    Cancelled while it enters, it waits for that, and leaves again.
    """
    entering = asyncio.ensure_future(asyncio.to_thread(manager.__enter__))
    try:
        yield await asyncio.shield(entering)
    finally:
        await asyncio.wait((entering,))
        if entering.exception() is None:
            await asyncio.to_thread(manager.__exit__, None, None, None)
