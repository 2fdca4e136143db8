import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.local.servers import free_port, redis_command
from services.router.ledger import Entry, Ledger, LedgerAway
from shared import farspan_pb2 as pb
from shared.access import ANONYMOUS, Access
from shared.errors import ConfigError
from tests.local_server import LocalServer
from tests.services.router.fleets import chain
from tests.tls_front import tls_front


@pytest.fixture
async def url(redis_url: str) -> str:
    """A database of the tests' own, empty."""
    own = redis_url.removesuffix("/0") + "/5"
    redis = Redis.from_url(own)
    await redis.flushdb()
    await redis.aclose()
    return own


@pytest.fixture
async def ledger(url: str) -> AsyncIterator[Ledger]:
    async with aclosing(Ledger(url, ANONYMOUS, 5.0)) as ledger:
        yield ledger


@pytest.fixture
async def other(url: str) -> AsyncIterator[Ledger]:
    async with aclosing(Ledger(url, ANONYMOUS, 5.0)) as ledger:
        yield ledger


def entry(
    request_id: str,
    lifetime_ms: int = 60_000,
    workers: tuple[str, str] = ("p0", "d0"),
    first: int = 0,
) -> Entry:
    prefill, decode = workers
    reservation = pb.Reservation(
        prefill=pb.WorkerRef(worker_id=prefill, epoch=1_796_026_266_032_118_332),
        decode=pb.WorkerRef(worker_id=decode, epoch=2),
        prefill_tokens=700,
        decode_pages=20,
        lifetime_ms=lifetime_ms,
    )
    return Entry(request_id, reservation, chain(15, first), prefix_s=5.0)


def ids(changes: object) -> list[str]:
    return [each if isinstance(each, str) else "+" + each.request_id for each in changes]  # type: ignore[attr-defined]


async def test_a_router_hears_what_another_has_promised(ledger: Ledger, other: Ledger) -> None:
    """All of it: amounts, workers' lives, the prompt's hashes."""
    await other.exchange([], [])
    await ledger.exchange([], [])
    assert (await ledger.make(entry("a"))).is_written

    news = await other.exchange([], [])

    (heard,) = news.changes
    assert isinstance(heard, Entry)
    assert heard.reservation == entry("a").reservation
    assert heard.block_hashes == chain(15)
    assert heard.age_s < 1.0
    assert not (await other.exchange([], [])).changes


async def test_a_promise_made_without_knowing_anothers_is_not_written(
    ledger: Ledger, other: Ledger
) -> None:
    """The last place is filled once: who was slower hears of it and decides again."""
    await ledger.exchange([], [])
    await other.exchange([], [])
    assert (await ledger.make(entry("a"))).is_written

    refused = await other.make(entry("b"))

    assert not refused.is_written
    assert ids(refused.changes) == ["+a"]
    assert (await other.make(entry("b"))).is_written
    assert ids((await ledger.exchange([], [])).changes) == ["+b"]


@pytest.mark.parametrize(
    ("workers", "first", "is_written"),
    [
        pytest.param(("p1", "d1"), 99, True, id="elsewhere"),
        pytest.param(("p0", "d1"), 99, False, id="same-prefill"),
        pytest.param(("p1", "d0"), 99, False, id="same-decode"),
        pytest.param(("p1", "d1"), 0, False, id="same-next-block"),
    ],
)
async def test_what_could_not_have_changed_the_choice_is_no_conflict(
    ledger: Ledger, other: Ledger, workers: tuple[str, str], first: int, is_written: bool
) -> None:
    """A promise elsewhere only makes workers dearer that were not chosen anyway."""
    await ledger.exchange([], [])
    await other.exchange([], [])
    await ledger.make(entry("a"))

    news = await other.make(entry("b", workers=workers, first=first))

    assert news.is_written == is_written
    assert ids(news.changes) == ["+a"], "it is told in any case"


async def test_an_end_is_heard_and_does_not_make_others_decide_again(
    ledger: Ledger, other: Ledger
) -> None:
    """It only makes room."""
    await ledger.exchange([entry("a"), entry("b")], [])
    await other.exchange([], [])
    await ledger.exchange([], ["a", "never heard of"])

    news = await other.make(entry("c"))

    assert news.is_written
    assert ids(news.changes) == ["a"]


async def test_who_loses_again_and_again_gets_a_turn(ledger: Ledger, other: Ledger) -> None:
    """Else a faster router could keep a slower one from ever placing anything."""
    await ledger.exchange([], [])
    await other.exchange([], [])
    await ledger.make(entry("a"))

    assert not (await other.make(entry("b"), is_insisting=True)).is_written
    assert not (await ledger.make(entry("c"))).is_written, "it is the other's turn"
    assert (await other.make(entry("b"))).is_written
    assert not (await ledger.make(entry("c"))).is_written, "it has to know of b first"
    assert (await ledger.make(entry("c"))).is_written


async def test_a_turn_that_is_not_taken_is_over_soon(ledger: Ledger, other: Ledger) -> None:
    """The router that had it may have died."""
    await ledger.exchange([], [])
    await other.exchange([], [])
    await ledger.make(entry("a"))
    await other.make(entry("b"), is_insisting=True)
    await asyncio.sleep(0.15)

    assert (await ledger.make(entry("c"))).is_written


async def test_a_prefix_that_is_there_already_is_no_reason_to_decide_again(
    ledger: Ledger, other: Ledger
) -> None:
    """Most prompts begin with the same instructions; what follows is what must be computed."""
    await ledger.exchange([], [])
    await other.exchange([], [])
    alike = replace(entry("a"), block_hashes=chain(10) + chain(5, first=99))
    await ledger.make(alike)
    elsewhere = entry("b", workers=("p1", "d1"))

    assert (await other.make(elsewhere, num_hit_blocks=10)).is_written


async def test_ends_are_told_with_the_next_promise_also_if_it_is_not_written(
    ledger: Ledger, other: Ledger
) -> None:
    """A busy router needs no step of its own for them."""
    await ledger.exchange([entry("a"), entry("b")], [])
    assert (await ledger.make(entry("c"), ["a"])).is_written
    await other.exchange([], [])
    await ledger.make(entry("d"))

    assert not (await other.make(entry("e"), ["b"])).is_written
    assert ids((await ledger.exchange([], [])).changes) == ["b"]


async def test_ending_twice_ends_once(ledger: Ledger, other: Ledger) -> None:
    """Every router hears of an end, and each tells the ledger."""
    await ledger.exchange([entry("a")], [])
    await other.exchange([], [])
    await ledger.exchange([], ["a"])
    await other.exchange([], ["a"])

    assert not (await ledger.exchange([], [])).changes


async def test_a_router_that_starts_is_told_everything(ledger: Ledger, url: str) -> None:
    """It counts what is promised from its first decision on."""
    await ledger.exchange([entry("a"), entry("b"), entry("c")], [])
    await ledger.exchange([], ["b"])

    async with aclosing(Ledger(url, ANONYMOUS, 5.0)) as fresh:
        refused = await fresh.make(entry("d"))

        assert refused.is_whole and not refused.is_new_life and not refused.is_written
        assert sorted(ids(refused.changes)) == ["+a", "+c"]
        assert (await fresh.make(entry("d"))).is_written


async def test_a_lease_ends_by_itself(ledger: Ledger, url: str) -> None:
    """A gateway and a router that both died end nothing."""
    await ledger.exchange([entry("a", lifetime_ms=30)], [])
    await asyncio.sleep(0.05)

    async with aclosing(Ledger(url, ANONYMOUS, 5.0)) as fresh:
        assert not (await fresh.exchange([], [])).changes


async def test_a_flushed_ledger_says_so(ledger: Ledger, url: str) -> None:
    """Routers then tell it again what they promised."""
    await ledger.exchange([entry("a")], [])
    redis = Redis.from_url(url)
    await redis.flushdb()
    await redis.aclose()

    news = await ledger.exchange([], [])

    assert news.is_whole and news.is_new_life and not news.changes


async def test_a_router_that_fell_far_behind_is_told_everything(
    ledger: Ledger, other: Ledger
) -> None:
    """The log is bounded; nobody guesses what was in it."""
    await other.exchange([], [])
    await ledger.exchange([entry("a")], [])
    for start in range(0, 9000, 500):
        some = [str(number) for number in range(start, start + 500)]
        await ledger.exchange([entry(each) for each in some], [])
        await ledger.exchange([], some)

    news = await other.exchange([], [])

    assert news.is_whole and not news.is_new_life
    assert ids(news.changes) == ["+a"]


async def test_many_routers_agree_on_who_was_first(url: str) -> None:
    """Each retries until it is written: nobody is lost, and each knew all before it."""
    ledgers = [Ledger(url, ANONYMOUS, 5.0) for _ in range(4)]
    known: list[list[str]] = [[] for _ in ledgers]
    order: list[tuple[int, str]] = []

    async def place(number: int, request_id: str) -> None:
        while True:
            news = await ledgers[number].make(entry(request_id))
            known[number] += [each for each in ids(news.changes) if each not in known[number]]
            if news.is_written:
                order.append((len(known[number]), request_id))
                known[number].append("+" + request_id)
                return

    for number in range(10):
        await asyncio.gather(*(place(who, f"{number}-{who}") for who in range(len(ledgers))))
    for ledger in ledgers:
        await ledger.aclose()

    assert sorted(place for place, _ in order) == list(range(40)), "a line, as by one router"


async def test_a_redis_that_is_away_is_told_at_once_and_without_its_password() -> None:
    """Placements go on by the router's own promises; retrying here would hold them up."""
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    async with aclosing(Ledger(url, ANONYMOUS, 5.0)) as ledger:
        with pytest.raises(LedgerAway) as failed:
            async with asyncio.timeout(1):
                await ledger.make(entry("a"))

    assert "secret" not in str(failed.value)


async def test_a_redis_with_a_password_lets_in_who_knows_it(tmp_path: Path) -> None:
    """The URL carries user and password, as for kv_index."""
    port = free_port()
    server = LocalServer(
        [*redis_command(port, tmp_path), "--requirepass", "secret"], port, tmp_path
    )
    server.start()
    try:
        for password, is_let_in in (("secret", True), ("wrong", False)):
            url = f"redis://:{password}@127.0.0.1:{port}/0"
            async with aclosing(Ledger(url, ANONYMOUS, 5.0)) as ledger:
                if is_let_in:
                    assert (await ledger.make(entry("a"))).is_whole
                else:
                    with pytest.raises(LedgerAway, match=r"(?i)password|auth"):
                        await ledger.make(entry("a"))
    finally:
        server.kill()


async def test_tls_is_spoken_with_those_that_the_ca_file_vouches_for(
    url: str, tmp_path: Path
) -> None:
    """And with nobody else: the hashes tell who asked the same thing before."""
    ca_file = tmp_path / "ca.pem"
    async with tls_front(url, ca_file) as port:
        secure = f"rediss://127.0.0.1:{port}/5"
        async with aclosing(Ledger(secure, Access(ca_file=ca_file), 5.0)) as ledger:
            await ledger.exchange([entry("a")], [])
        async with aclosing(Ledger(secure, ANONYMOUS, 5.0)) as ledger:
            with pytest.raises(LedgerAway, match="certificate"):
                await ledger.make(entry("b"))


@pytest.mark.parametrize(
    ("url", "ca_file"),
    [
        pytest.param("redis://me:secret@127.0.0.1:1", "ca.pem", id="a-ca-file-without-tls"),
        pytest.param("rediss://me:secret@127.0.0.1:1", "missing.pem", id="no-ca-file"),
        pytest.param("http://me:secret@127.0.0.1:1", None, id="another-scheme"),
    ],
)
def test_settings_that_cannot_work_are_the_operators_fault(
    url: str, ca_file: str | None, tmp_path: Path
) -> None:
    """Told at the start, by place and without the password."""
    (tmp_path / "ca.pem").write_text("")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1") as refused:
        Ledger(url, Access(ca_file=tmp_path / ca_file if ca_file else None), 1.0)

    assert "secret" not in str(refused.value)


async def test_a_cancellation_is_never_lost(ledger: Ledger) -> None:
    """redis-py's own time limit swallows one that comes with an answer, and a stop then hangs."""

    async def exchange() -> None:
        while True:
            await ledger.exchange([], [])

    for number in range(60):
        task = asyncio.create_task(exchange())
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(task, return_exceptions=True)


async def test_a_silent_redis_costs_at_most_the_time_limit() -> None:
    """It accepts the connection and never answers (D16)."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        async with aclosing(Ledger(url, ANONYMOUS, 0.1)) as ledger:
            async with asyncio.timeout(2):
                with pytest.raises(LedgerAway, match=r"no answer within 0\.1 s"):
                    await ledger.make(entry("a"))
