import asyncio
import threading

import pytest

from shared import tasks


async def test_background_work_ends_with_the_block() -> None:
    """Cancelled, so that it can clean up."""
    seen: list[str] = []

    async def work() -> None:
        try:
            seen.append("runs")
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    async with tasks.background(work()):
        await asyncio.sleep(0)

    assert seen == ["runs", "ended"]


async def test_a_failure_in_the_background_ends_the_block() -> None:
    """A service whose loop has died must not look alive."""

    async def fail() -> None:
        raise ValueError("bug")

    with pytest.raises(ExceptionGroup) as caught:
        async with tasks.background(fail()):
            await asyncio.Event().wait()

    assert isinstance(caught.value.exceptions[0], ValueError)


async def test_finish_waits_a_while_and_then_cancels() -> None:
    """A short task keeps its result, an endless one does not keep the process."""

    async def short() -> None:
        await asyncio.sleep(0)

    async def endless() -> None:
        await asyncio.Event().wait()

    running = [asyncio.create_task(short()), asyncio.create_task(endless())]
    await tasks.finish(running, grace_s=0.05)
    await tasks.finish([], grace_s=0.05)

    assert not running[0].cancelled()
    assert running[1].cancelled()


class Slow:
    """Takes until it is told, to enter."""

    def __init__(self) -> None:
        self.may_enter = threading.Event()
        self.left = False

    def __enter__(self) -> str:
        self.may_enter.wait()
        return "value"

    def __exit__(self, *_: object) -> None:
        self.left = True


async def test_what_is_cancelled_while_it_enters_is_left_again() -> None:
    """Memory that a thread has just pinned must not stay so."""
    slow = Slow()

    async def use() -> None:
        async with tasks.entered_aside(slow):
            raise AssertionError("it was cancelled before")

    using = asyncio.create_task(use())
    await asyncio.sleep(0.01)
    using.cancel()
    await asyncio.sleep(0.01)
    assert not using.done()

    slow.may_enter.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert slow.left


async def test_what_fails_to_enter_is_not_left() -> None:
    class Failing(Slow):
        def __enter__(self) -> str:
            raise ValueError("bug")

    failing = Failing()
    with pytest.raises(ValueError, match="bug"):
        async with tasks.entered_aside(failing):
            pass
    assert not failing.left
