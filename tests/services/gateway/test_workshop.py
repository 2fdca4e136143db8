"""Heavy work is shared out, and given up when nobody waits for it."""

import asyncio
import threading
import time

import pytest

from services.gateway.wanted import check_wanted
from services.gateway.workshop import SMALL_BYTES, Workshop
from shared.errors import Cancelled

MANY = 8


def hold(gate: threading.Event) -> None:
    gate.wait(5)


async def test_a_tenant_s_large_work_keeps_nobody_else_waiting() -> None:
    """Nor its own small work."""
    gate = threading.Event()
    async with Workshop() as workshop:
        held = [
            asyncio.create_task(workshop.run("a", SMALL_BYTES, hold, gate)) for _ in range(MANY)
        ]
        await asyncio.sleep(0.05)
        try:
            async with asyncio.timeout(2):
                assert await workshop.run("b", SMALL_BYTES, max, 1, 2) == 2
                assert await workshop.run("a", 1, max, 1, 2) == 2
        finally:
            gate.set()
        await asyncio.gather(*held)


async def test_work_that_nobody_waits_for_is_told_so() -> None:
    """It ends at its next step, and its turn is another's."""
    ended = threading.Event()

    def work() -> None:
        try:
            while True:
                check_wanted()
                time.sleep(0.01)
        except Cancelled:
            ended.set()
            raise

    async with Workshop() as workshop:
        task = asyncio.create_task(workshop.run("a", SMALL_BYTES, work))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        assert await asyncio.to_thread(ended.wait, 2)
        async with asyncio.timeout(2):
            assert await workshop.run("a", SMALL_BYTES, max, 1, 2) == 2


async def test_an_error_of_the_work_is_the_caller_s() -> None:
    async with Workshop() as workshop:
        with pytest.raises(ZeroDivisionError):
            await workshop.run("a", 1, divmod, 1, 0)


def test_work_elsewhere_is_wanted() -> None:
    """A script that tokenises is in no workshop."""
    check_wanted()
