"""What it costs that routers share their promises: one router with and without Redis, then two.

Prompts of 104,000 tokens, 16 prefill and 16 decode workers, 100 open promises. With and without
Redis take turns, so a load on the machine falls on both.
"""

import asyncio
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from benchmarks import report
from services.local.servers import free_port, redis_command
from services.router.fleet import Heard
from services.router.ledger import Entry, Ledger
from services.router.policy import Decision, place
from services.router.promises import Promises
from services.router.reservations import Reservations
from services.router.view import Rates
from shared import farspan_pb2 as pb
from shared.access import ANONYMOUS
from tests.services.router.fleets import chain, decode, prefill, request

_NUM_PLACEMENTS = 500
_NUM_OPEN = 100
_PROMPT_TOKENS = 104_000
_FLEET = [
    Heard(worker.heartbeat, 0.0)
    for number in range(16)
    for worker in (prefill(f"p{number}"), decode(f"d{number}"))
]


class _Router:
    """A router's promises over a fleet that tells nothing new."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.reservations = Reservations(Promises(time.monotonic), ledger)
        self._promises = self.reservations._promises
        self._open: list[str] = []

    async def place(self, placing: pb.PlaceRequest) -> float:
        """The seconds that a decision and its promise took."""

        def decide() -> Decision:
            hits = self._promises.prefixes_on_the_way(placing.block_hashes)
            return place(placing, self._promises.applied(_FLEET), hits, Rates())

        begun_s = time.perf_counter()
        await self.reservations.reserve(placing, 60.0, decide)
        took_s = time.perf_counter() - begun_s
        self._open.append(placing.request_id)
        if len(self._open) > _NUM_OPEN:
            self.reservations.end(self._open.pop(0))
        return took_s


def measure() -> dict[str, float]:
    """All figures; a minute."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    prompts = [
        request(
            _PROMPT_TOKENS, request_id=uuid.uuid4().hex, hashes=chain(1625, first=2000 * number)
        )
        for number in range(2 * _NUM_PLACEMENTS)
    ]
    async with _redis() as url:
        figures = await _one_step(url)
        figures |= await _one_router(url, prompts[:_NUM_PLACEMENTS])
        figures |= await _two_routers(url, prompts)
    return figures


async def _one_step(url: str) -> dict[str, float]:
    """A promise written, with nothing to decide."""
    took_s = []
    async with aclosing(Ledger(url, ANONYMOUS, 5.0)) as ledger:
        await ledger.exchange([], [])
        for number in range(_NUM_PLACEMENTS):
            workers = pb.WorkerRef(worker_id="p0", epoch=1), pb.WorkerRef(worker_id="d0", epoch=1)
            reserved = pb.Reservation(prefill=workers[0], decode=workers[1], lifetime_ms=60_000)
            entry = Entry(f"step-{number}", reserved, chain(1625), prefix_s=5.0)
            begun_s = time.perf_counter()
            await ledger.make(entry)
            took_s.append(time.perf_counter() - begun_s)
            await ledger.exchange([], [entry.request_id])
    return {"promise_step_p50_ms": _at(took_s, 0.5), "promise_step_p99_ms": _at(took_s, 0.99)}


async def _one_router(url: str, prompts: Sequence[pb.PlaceRequest]) -> dict[str, float]:
    alone_s, shared_s = [], []
    async with aclosing(Ledger(url, ANONYMOUS, 5.0)) as ledger:
        alone, sharing = _Router(None), _Router(ledger)
        await sharing.reservations.open()
        for placing in prompts:
            alone_s.append(await alone.place(placing))
            shared_s.append(await sharing.place(placing))
        await sharing.reservations.close()
    return {
        "place_alone_p50_ms": _at(alone_s, 0.5),
        "place_alone_p99_ms": _at(alone_s, 0.99),
        "place_shared_p50_ms": _at(shared_s, 0.5),
        "place_shared_p99_ms": _at(shared_s, 0.99),
    }


async def _two_routers(url: str, prompts: Sequence[pb.PlaceRequest]) -> dict[str, float]:
    """Both as fast as they can, in one process: the most conflicts that there can be."""
    async with (
        aclosing(Ledger(url, ANONYMOUS, 5.0)) as left,
        aclosing(Ledger(url, ANONYMOUS, 5.0)) as right,
    ):
        routers = _Router(left), _Router(right)
        for router in routers:
            await router.reservations.open()

        async def place_all(router: _Router, own: Sequence[pb.PlaceRequest]) -> None:
            for placing in own:
                await router.place(placing)

        begun_s = time.perf_counter()
        await asyncio.gather(
            place_all(routers[0], prompts[::2]), place_all(routers[1], prompts[1::2])
        )
        took_s = time.perf_counter() - begun_s
    num_conflicts = sum(router.reservations.num_conflicts for router in routers)
    return {
        "two_routers_placements_per_s": len(prompts) / took_s,
        "two_routers_conflicts": num_conflicts / len(prompts),
    }


@asynccontextmanager
async def _redis() -> AsyncIterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = redis_command(port, Path(folder))
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        try:
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    break
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()
            server.wait()


def _at(took_s: Sequence[float], share: float) -> float:
    """This quantile, in milliseconds."""
    return sorted(took_s)[int(len(took_s) * share)] * 1000


if __name__ == "__main__":
    report.write("shared_promises", measure())
