import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.local.servers import free_port, redis_command
from services.router.fleet import Heard
from services.router.ledger import Ledger
from services.router.policy import Decision, place
from services.router.promises import Promises
from services.router.reservations import Reservations
from services.router.view import Promised, Rates
from shared import farspan_pb2 as pb
from shared import tasks
from shared.access import ANONYMOUS
from tests.local_server import LocalServer
from tests.services.router.fleets import chain, decode, load, prefill, request

HEARD_S = 0.0  # before everything: no heartbeat knows of any promise
NOBODY = Promised()


class RouterSide:
    """One router's promises over a fleet that never tells anything new."""

    def __init__(self, ledger: Ledger | None, fleet: list[pb.Heartbeat]) -> None:
        self.promises = Promises(asyncio.get_running_loop().time)
        self.reservations = Reservations(self.promises, ledger, asyncio.get_running_loop().time)
        self.num_decided = 0
        self._fleet = [Heard(heartbeat, HEARD_S) for heartbeat in fleet]

    async def place(self, placing: pb.PlaceRequest, lifetime_s: float = 60.0) -> pb.Placement:
        def decide() -> Decision:
            self.num_decided += 1
            hits = self.promises.prefixes_on_the_way(placing.block_hashes)
            workers = self.promises.applied(self._fleet)
            return place(placing, workers, hits, Rates())

        return (await self.reservations.reserve(placing, lifetime_s, decide)).placement

    def promised(self, worker_id: str) -> Promised:
        workers = self.promises.applied(self._fleet)
        return next(each.promised for each in workers if each.key.worker_id == worker_id)


Routers = Callable[..., "asynccontextmanager[list[RouterSide]]"]


@pytest.fixture
async def url(redis_url: str) -> str:
    """A database of the tests' own, empty."""
    own = redis_url.removesuffix("/0") + "/6"
    await flush(own)
    return own


async def flush(url: str) -> None:
    redis = Redis.from_url(url)
    await redis.flushdb()
    await redis.aclose()


@asynccontextmanager
async def routers(
    url: str, fleet: list[pb.Heartbeat], num_routers: int = 2
) -> AsyncIterator[list[RouterSide]]:
    async with AsyncExitStack() as stack:
        sides = []
        for _ in range(num_routers):
            ledger = await stack.enter_async_context(aclosing(Ledger(url, ANONYMOUS, 5.0)))
            side = RouterSide(ledger, fleet)
            await side.reservations.open()
            stack.push_async_callback(side.reservations.close)
            await stack.enter_async_context(tasks.background(side.reservations.run()))
            sides.append(side)
        yield sides


def small_fleet(num_prefills: int = 6, num_decodes: int = 2) -> list[pb.Heartbeat]:
    prefills = [prefill(f"p{i}").heartbeat for i in range(num_prefills)]
    return prefills + [decode(f"d{i}").heartbeat for i in range(num_decodes)]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110  # no event to wait for
            await asyncio.sleep(0.01)


async def test_two_routers_do_not_both_fill_the_last_place(url: str) -> None:
    """Decided at the same moment, from the same view: the slower one decides again."""
    limits = pb.Limits(max_sequence_tokens=100_000, max_concurrent=1)
    empty, busy = decode("d0", limits=limits), decode("d1", load=load(num_running=30))
    fleet = [prefill("p0").heartbeat, empty.heartbeat, busy.heartbeat]
    async with routers(url, fleet) as sides:
        for number in range(20):
            names = [f"{number}-{who}" for who in range(len(sides))]
            chosen = await asyncio.gather(
                *(
                    side.place(request(request_id=name))
                    for side, name in zip(sides, names, strict=True)
                )
            )
            assert sorted(one.decode.worker_id for one in chosen) == ["d0", "d1"]
            for side in sides:
                for name in names:
                    side.reservations.end(name)
            await until(lambda: not any(len(side.promises) for side in sides))

        assert sum(side.reservations.num_conflicts for side in sides) >= 20


async def test_a_burst_over_two_routers_goes_together(url: str) -> None:
    """32 equal prompts, half of them at each: at most two workers compute the prefix (C8)."""
    async with routers(url, small_fleet()) as sides:
        chosen = await asyncio.gather(
            *(sides[i % 2].place(request(8000, request_id=str(i))) for i in range(32))
        )

        assert len({one.prefill.worker_id for one in chosen}) <= 2
        assert [one.decode.worker_id for one in chosen].count("d0") == 16
        await until(lambda: [len(side.promises) for side in sides] == [32, 32])
        assert sides[0].promised("d0") == sides[1].promised("d0")


async def test_no_router_is_kept_from_placing_by_the_others(url: str) -> None:
    """All decide about the same worker as fast as they can; who loses too often gets a turn."""
    fleet = [prefill("p0").heartbeat, decode("d0").heartbeat]

    async def place_all(side: RouterSide, who: int) -> None:
        for number in range(50):
            await side.place(request(request_id=f"{who}-{number}"))
            side.reservations.end(f"{who}-{number}")

    async with routers(url, fleet, num_routers=3) as sides:
        await asyncio.gather(*(place_all(side, who) for who, side in enumerate(sides)))
        await until(lambda: not any(len(side.promises) for side in sides))

        assert [side.reservations.num_unshared for side in sides] == [0, 0, 0]


async def test_500_aborts_at_two_routers_leave_nothing(url: str) -> None:
    """Whoever hears of the end, and how often, nothing stays: neither here nor there (C1)."""
    async with routers(url, small_fleet()) as sides:
        for start in range(0, 500, 50):
            numbers = range(start, start + 50)
            await asyncio.gather(*(sides[i % 2].place(request(request_id=str(i))) for i in numbers))
            for i in numbers:
                sides[i % 3 % 2].reservations.end(str(i))
                if i % 2:
                    sides[0].reservations.end(str(i))
                    sides[1].reservations.end(str(i))
        await until(lambda: not any(len(side.promises) for side in sides))

        assert [side.promised("d0") for side in sides] == [NOBODY, NOBODY]
    redis = Redis.from_url(url)
    assert not [key async for key in redis.scan_iter("farspan:router:v1:promise:*")]
    assert await redis.zcard("farspan:router:v1:open") == 0
    await redis.aclose()


async def test_a_router_that_restarts_knows_what_is_promised(url: str) -> None:
    """Else it would fill workers again that are full."""
    async with routers(url, small_fleet()) as (first, second):
        await first.place(request(request_id="a"))
        await second.place(request(request_id="b"))
    async with routers(url, small_fleet(), num_routers=1) as (reborn,):
        assert sorted(promise.request_id for promise in reborn.promises) == ["a", "b"]
        assert reborn.promised("d0").num_requests == reborn.promised("d1").num_requests == 1


async def test_a_dead_routers_promises_are_ended_by_the_others(url: str) -> None:
    """Its requests go on without it, and end."""
    async with routers(url, small_fleet(), num_routers=1) as (doomed,):
        await doomed.place(request(request_id="a"))
    async with routers(url, small_fleet(), num_routers=1) as (other,):
        other.reservations.end("a")
        await until(lambda: not len(other.promises))
    async with routers(url, small_fleet(), num_routers=1) as (late,):
        assert not len(late.promises)


async def test_a_request_that_ended_before_it_was_heard_of_is_promised_nothing(url: str) -> None:
    """The end came over NATS, faster than the promise through Redis."""
    async with routers(url, small_fleet()) as (first, second):
        second.reservations.end("a")
        await first.place(request(request_id="a"))
        await second.place(request(request_id="b"))

        await until(lambda: [p.request_id for p in first.promises] == ["b"])
        assert [promise.request_id for promise in second.promises] == ["b"]


async def test_routers_go_on_alone_while_redis_is_away_and_share_again_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No request is lost, no outage costs more than one time-out, and a flush is healed."""
    port = free_port()
    server = LocalServer(redis_command(port, tmp_path), port, tmp_path)
    server.start()
    try:
        async with routers(f"redis://{server.address}/0", small_fleet()) as sides:
            await sides[0].place(request(request_id="before"))
            server.kill()
            with caplog.at_level(logging.ERROR):
                for i in range(10):
                    assert (await sides[i % 2].place(request(request_id=str(i)))).prefill.epoch
            assert all(side.reservations.away_reason for side in sides)
            assert sum(side.reservations.num_unshared for side in sides) == 10
            assert caplog.text.count("Redis is away") == 2, "once each"
            sides[0].reservations.end("0")

            server.start()  # empty
            await until(lambda: not any(side.reservations.away_reason for side in sides))
            left = {"before", *map(str, range(1, 10))}
            await until(
                lambda: all({p.request_id for p in side.promises} == left for side in sides)
            )
            assert sides[0].promised("d0") == sides[1].promised("d0")
    finally:
        server.kill()


async def test_a_flush_is_healed_by_the_routers(url: str) -> None:
    """Redis holds nothing that cannot be rebuilt."""
    async with routers(url, small_fleet()) as sides:
        for i in range(20):
            await sides[i % 2].place(request(request_id=str(i)))
        await flush(url)

        async with routers(url, small_fleet(), num_routers=1) as (fresh,):
            await until(lambda: len(fresh.promises) == 20)
        await until(lambda: [len(side.promises) for side in sides] == [20, 20])


async def test_without_redis_a_router_promises_alone() -> None:
    """ROUTER_REDIS_URL is empty: one router, nothing to share."""
    side = RouterSide(None, small_fleet())
    await side.reservations.open()

    await asyncio.gather(*(side.place(request(request_id=str(i))) for i in range(8)))
    side.reservations.end("3")

    assert len(side.promises) == 7
    assert side.num_decided == 8
    await side.reservations.run()


async def test_a_prompt_of_a_million_tokens_is_shared_too(url: str) -> None:
    """256 KiB of hashes, until the index must know them."""
    big = request(1_000_000, hashes=chain(15_625))
    async with routers(url, small_fleet()) as (first, second):
        placed = await first.place(big)
        await until(lambda: len(second.promises) == 1)

        (hit,) = second.promises.prefixes_on_the_way(big.block_hashes).items()
        assert hit[0].worker_id == placed.prefill.worker_id
        assert hit[1].num_blocks == 15_625
