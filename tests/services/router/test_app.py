import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import redis.asyncio as redis

from services.local.servers import free_port
from services.router import app, records
from services.router.app import Router
from services.router.config import RouterConfig
from shared import bus, prefix_rpc, subjects, telemetry
from shared import farspan_pb2 as pb
from shared.bus import Bus
from shared.errors import WorkerLost
from tests.local_server import own_nats
from tests.services.router.fleets import chain, heartbeat, load, request

DEADLINE_S = 60


@pytest.fixture
async def link(nats_url: str) -> AsyncIterator[Bus]:
    async with bus.connect(nats_url, "test") as link:
        yield link


@pytest.fixture
def config(nats_url: str) -> RouterConfig:
    return RouterConfig(nats_url=nats_url, kv_index_address=f"127.0.0.1:{free_port()}", learn_s=0)


@asynccontextmanager
async def index_of(config: RouterConfig, *hits: pb.PrefixHit) -> AsyncIterator[list[bytes]]:
    """A kv_index that always finds the same; yields what it was asked."""
    asked: list[bytes] = []

    def answer(query: pb.PrefixQuery) -> pb.PrefixHits:
        with telemetry.span("kv_index.longest_prefix"):
            asked.append(query.block_hashes)
        return pb.PrefixHits(hits=hits)

    async with prefix_rpc.serve(config.kv_index_address, answer):
        yield asked


def hit(worker_id: str, num_blocks: int) -> pb.PrefixHit:
    worker = pb.WorkerRef(worker_id=worker_id, epoch=1)
    return pb.PrefixHit(worker=worker, tier=pb.TIER_DEVICE, num_blocks=num_blocks)


@asynccontextmanager
async def routing(
    config: RouterConfig, link: Bus, beats: Iterable[pb.Heartbeat]
) -> AsyncIterator[Router]:
    """A router that has heard these heartbeats."""
    async with app.serve(config) as router:
        expected = 0
        for beat in beats:
            await link.publish(subjects.HEARTBEAT, beat)
            expected += 1
        async with asyncio.timeout(5):
            while router.details()["workers"] < expected:  # noqa: ASYNC110  # no event to wait for
                await asyncio.sleep(0.005)
        yield router


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110  # no event to wait for
            await asyncio.sleep(0.005)


def fleet() -> list[pb.Heartbeat]:
    return [
        heartbeat("p0", pb.ROLE_PREFILL, load=load(waiting_tokens=300)),
        heartbeat("p1", pb.ROLE_PREFILL),
        heartbeat("d0", pb.ROLE_DECODE),
    ]


def placing(num_tokens: int = 1000, **values: object) -> pb.PlaceRequest:
    deadline_unix_ms = int((time.time() + DEADLINE_S) * 1000)
    request_id = uuid.uuid4().hex
    return request(
        num_tokens,
        request_id=request_id,
        deadline_unix_ms=deadline_unix_ms,
        **values,  # type: ignore[arg-type]
    )


async def place(link: Bus, wanted: pb.PlaceRequest) -> pb.PlaceReply:
    return await link.request(subjects.PLACE, wanted, timeout_s=5)


async def test_a_router_answers_nobody_before_it_has_heard_the_fleet(
    config: RouterConfig, link: Bus
) -> None:
    """Its first answers would be that there are no workers."""

    async def beat() -> None:
        while True:
            for heartbeat_ in fleet():
                await link.publish(subjects.HEARTBEAT, heartbeat_)
            await asyncio.sleep(0.2)

    async def serve() -> None:
        async with app.serve(replace(config, learn_s=1.0)):
            await asyncio.sleep(DEADLINE_S)

    tasks = [asyncio.create_task(beat()), asyncio.create_task(serve())]
    reply = None
    async with asyncio.timeout(5):
        while reply is None:
            try:
                reply = await place(link, placing())
            except WorkerLost:
                await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert reply.HasField("placement"), reply.failure.message


async def test_a_request_goes_where_its_prefix_is(config: RouterConfig, link: Bus) -> None:
    """The whole way: heartbeats in, hits from kv_index, placement out."""
    async with index_of(config, hit("p0", 15)) as asked, routing(config, link, fleet()):
        reply = await place(link, placing())

    assert reply.placement.prefill == pb.WorkerRef(worker_id="p0", epoch=1)
    assert reply.placement.decode == pb.WorkerRef(worker_id="d0", epoch=1)
    assert reply.placement.prefill_hit_tokens == 960
    assert "hit 960 tokens" in reply.placement.reason
    assert asked == [chain(15)]


async def test_without_kv_index_load_alone_decides_and_the_figures_say_so(
    config: RouterConfig, link: Bus
) -> None:
    """An index that is away costs hits, never a request (D8)."""
    async with routing(config, link, fleet()) as router:
        reply = await place(link, placing())
        assert reply.placement.prefill.worker_id == "p1"
        assert router.details()["placed_without_index"] == 1
        assert "kv_index is away" in router.state()[1]

        async with index_of(config, hit("p0", 15)):
            async with asyncio.timeout(5):
                while router.state() != (True, "ready"):
                    await place(link, placing())
            reply = await place(link, placing())
            assert reply.placement.prefill_hit_tokens == 960


async def test_a_silent_kv_index_costs_at_most_its_time_limit(
    config: RouterConfig, link: Bus
) -> None:
    """It accepts the connection and never answers (D16)."""
    host, port = config.kv_index_address.split(":")
    with socket.create_server((host, int(port))):
        async with routing(config, link, fleet()):
            begun_s = time.monotonic()
            reply = await place(link, placing())

    assert reply.HasField("placement")
    assert time.monotonic() - begun_s < 1.0


async def test_a_burst_is_promised_before_any_heartbeat_tells(
    config: RouterConfig, link: Bus
) -> None:
    """32 equal prompts at once end at two prefill workers at most (C8)."""
    beats = [heartbeat(f"p{i}", pb.ROLE_PREFILL) for i in range(6)]
    beats += [heartbeat("d0", pb.ROLE_DECODE), heartbeat("d1", pb.ROLE_DECODE)]
    async with index_of(config), routing(config, link, beats) as router:
        wanted = [placing(8000) for _ in range(32)]
        replies = await asyncio.gather(*(place(link, each) for each in wanted))
        assert router.details()["open_promises"] == 32

        for each in wanted:
            ended = pb.PlacementEnded(request_id=each.request_id)
            await link.publish(subjects.PLACEMENT_ENDED, ended)
        async with asyncio.timeout(5):
            while router.details()["open_promises"]:  # noqa: ASYNC110  # no event to wait for
                await asyncio.sleep(0.005)

    assert len({reply.placement.prefill.worker_id for reply in replies}) <= 2
    assert len({reply.placement.decode.worker_id for reply in replies}) == 2


async def test_the_fleet_is_as_before_when_nats_comes_back(
    config: RouterConfig, tmp_path: Path
) -> None:
    """It was the router that could not hear; nobody is taken for dead (D8)."""
    with own_nats(tmp_path) as server:
        own = replace(config, nats_url=f"nats://{server.address}", silence_s=1.0)
        async with (
            bus.connect(own.nats_url, "test") as link,
            index_of(own, hit("p0", 15)),
            routing(own, link, fleet()) as router,
        ):
            server.kill()
            async with asyncio.timeout(10):
                while router.state()[0]:  # noqa: ASYNC110  # no event to wait for
                    await asyncio.sleep(0.01)
                await asyncio.sleep(1.5)  # longer than the silence that ends a worker
                server.start()
                while not (router.state()[0] and link.is_connected):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            reply = await place(link, placing())

    assert reply.placement.prefill.worker_id == "p0"


async def test_refusals_are_answers(config: RouterConfig, link: Bus) -> None:
    """Each has its kind: the gateway maps it to a status."""
    small = pb.Limits(max_sequence_tokens=5000, max_concurrent=8)
    beats = [heartbeat("p0", pb.ROLE_PREFILL), heartbeat("d0", pb.ROLE_DECODE, limits=small)]
    late, unhashed = placing(), placing(hashes=b"")
    late.deadline_unix_ms = int(time.time() * 1000) - 1

    async with index_of(config), routing(config, link, beats) as router:
        kinds = [
            (await place(link, wanted)).failure.kind
            for wanted in (placing(6000), late, unhashed, pb.PlaceRequest(), placing())
        ]
        await link.publish(
            subjects.HEARTBEAT,
            heartbeat("p0", pb.ROLE_PREFILL, state=pb.SERVICE_STATE_DRAINING),
        )
        await asyncio.sleep(0.05)
        drained = await place(link, placing())
        (kept,) = router.decisions(late.request_id)

    assert kept.outcome.failure.kind == pb.FAILURE_KIND_DEADLINE
    assert kinds == [
        pb.FAILURE_KIND_TOO_LONG,
        pb.FAILURE_KIND_DEADLINE,
        pb.FAILURE_KIND_BAD_REQUEST,
        pb.FAILURE_KIND_BAD_REQUEST,
        pb.FAILURE_KIND_UNSPECIFIED,
    ]
    assert drained.failure.kind == pb.FAILURE_KIND_OVERLOADED
    assert drained.failure.retry_after_ms > 0


async def test_the_figures_are_told_to_prometheus(config: RouterConfig, link: Bus) -> None:
    own = replace(config, health_port=free_port())
    beats = [heartbeat("p0", pb.ROLE_PREFILL), heartbeat("d0", pb.ROLE_DECODE)]

    async with index_of(own), routing(own, link, beats), httpx.AsyncClient() as http:
        await place(link, placing())
        await asyncio.sleep(0.5)  # they are a quarter of a second old
        told = (await http.get(f"http://127.0.0.1:{own.health_port}/metrics")).text

    assert "# TYPE farspan_router_open_promises gauge\nfarspan_router_open_promises 1\n" in told
    assert "# TYPE farspan_router_placed_total counter\nfarspan_router_placed_total 1\n" in told


async def test_a_deadline_beyond_all_sense_is_a_day(config: RouterConfig, link: Bus) -> None:
    """Its promise would outlive every router."""
    beats = [heartbeat("p0", pb.ROLE_PREFILL), heartbeat("d0", pb.ROLE_DECODE)]
    wanted = placing()
    wanted.deadline_unix_ms = 2**63 - 1

    async with index_of(config), routing(config, link, beats) as router:
        reply = await place(link, wanted)
        (kept,) = router.decisions(wanted.request_id)

    assert reply.HasField("placement")
    assert kept.inputs.lifetime_s == 86_400


async def test_a_placement_is_one_tree_of_spans(
    config: RouterConfig, link: Bus, tmp_path: Path
) -> None:
    """gateway -> router.place -> index.lookup -> kv_index, with the figures as attributes."""
    spans = tmp_path / "spans"
    with telemetry.configure("test", trace_file=spans):
        async with index_of(config, hit("p0", 15)), routing(config, link, fleet()):
            with telemetry.span("gateway"):
                await place(link, placing())

    by_name = {line["name"]: line for line in map(json.loads, spans.read_text().splitlines())}
    path = ["gateway", "router.place", "index.lookup", "kv_index.longest_prefix"]
    for parent, child in pairwise(path):
        assert by_name[child]["parent_id"] == by_name[parent]["span_id"]
    assert by_name["index.lookup"]["attributes"]["hit_blocks"] == 15
    assert "hit 960 tokens" in by_name["router.place"]["attributes"]["reason"]


async def test_promises_to_a_gateway_that_died_are_ended(
    config: RouterConfig, link: Bus, redis_url: str
) -> None:
    """It cannot end them itself; until its requests' deadlines an idle fleet would look full."""
    own = replace(config, redis_url=redis_url.removesuffix("/0") + "/6", gateway_silence_s=1.0)
    beats = [heartbeat("p0", pb.ROLE_PREFILL), heartbeat("d0", pb.ROLE_DECODE)]
    async with (
        index_of(own),
        routing(own, link, beats) as first,
        routing(own, link, beats) as other,
    ):
        for number in range(10):
            wanted = placing(1000)
            wanted.gateway_id = "dead" if number < 6 else "alive"
            await place(link, wanted)

        deadline_s = time.monotonic() + 10
        while {router.details()["open_promises"] for router in (first, other)} != {4}:
            assert time.monotonic() < deadline_s, first.details()
            await link.publish(subjects.GATEWAY_ALIVE, pb.GatewayAlive(gateway_id="alive"))
            await asyncio.sleep(0.1)
        unshared = [router.details()["placed_unshared"] for router in (first, other)]
    async with routing(own, link, beats) as later:
        left = later.details()["open_promises"]

    assert unshared == [0, 0]
    assert left == 4


async def test_a_router_that_was_deaf_takes_nobody_for_dead(
    config: RouterConfig, tmp_path: Path
) -> None:
    """NATS stands still, its connections stay open: all promises of living gateways were ended."""
    with own_nats(tmp_path) as server:
        own = replace(config, nats_url=f"nats://{server.address}", gateway_silence_s=3.0)
        async with (
            bus.connect(own.nats_url, "test") as link,
            index_of(own),
            routing(own, link, fleet()) as router,
        ):
            wanted = placing()
            wanted.gateway_id = "gw"
            await place(link, wanted)
            await link.publish(subjects.GATEWAY_ALIVE, pb.GatewayAlive(gateway_id="gw"))
            await asyncio.sleep(0.5)
            server.pause()
            await asyncio.sleep(4.0)
            server.go_on()
            await asyncio.sleep(0.5)
            after_the_pause = router.details()["open_promises"]
            for _ in range(40):  # a worker speaks, the gateway never again
                await link.publish(subjects.HEARTBEAT, fleet()[0])
                await asyncio.sleep(0.1)
            figures = router.details()

    assert after_the_pause == 1
    assert (figures["open_promises"], figures["ended_for_silent_gateways"]) == (0, 1)


async def test_a_fleet_of_which_nobody_speaks_while_nats_answers_is_dead(
    config: RouterConfig, link: Bus
) -> None:
    """Its workers were placed on for ever, as long as no gateway spoke."""
    own = replace(config, silence_s=1.0)
    async with index_of(own), routing(own, link, fleet()) as router:
        await until(lambda: router.details()["workers"] == 0)
        reply = await place(link, placing())

    assert reply.failure.kind == pb.FAILURE_KIND_OVERLOADED


async def test_a_heartbeat_that_makes_no_sense_is_counted_and_told_once(
    config: RouterConfig, link: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """It came twice a second with a traceback each."""
    absurd = heartbeat("p9", pb.ROLE_PREFILL, load=load(tokens_per_s=float("nan")))
    async with index_of(config), routing(config, link, fleet()) as router:
        for _ in range(3):
            await link.publish(subjects.HEARTBEAT, absurd)
        await until(lambda: router.details()["refused_heartbeats"] == 3)
        workers = router.details()["workers"]

    assert workers == 3
    assert [record.message for record in caplog.records if "p9" in record.message] == [
        "refused: a heartbeat of p9 measured nan"
    ]


async def test_two_routers_share_their_promises_and_a_burst_goes_together(
    config: RouterConfig, link: Bus, redis_url: str
) -> None:
    """Through NATS and Redis, each router deciding half: at most two workers compute it (C8)."""
    own = replace(config, redis_url=redis_url.removesuffix("/0") + "/7", redis_timeout_s=5.0)
    beats = [heartbeat(f"p{i}", pb.ROLE_PREFILL) for i in range(6)]
    beats += [heartbeat("d0", pb.ROLE_DECODE), heartbeat("d1", pb.ROLE_DECODE)]
    async with (
        index_of(own),
        routing(own, link, beats) as first,
        routing(own, link, beats) as other,
    ):
        wanted = [placing(8000) for _ in range(32)]
        replies = await asyncio.gather(*(place(link, each) for each in wanted))
        counts = [router.details()["placed"] for router in (first, other)]
        for router in (first, other):
            await until(lambda router=router: router.details()["open_promises"] == 32)  # type: ignore[misc]
        for each in wanted:
            ended = pb.PlacementEnded(request_id=each.request_id)
            await link.publish(subjects.PLACEMENT_ENDED, ended)
        for router in (first, other):
            await until(lambda router=router: not router.details()["open_promises"])  # type: ignore[misc]
        unshared = [router.details()["placed_unshared"] for router in (first, other)]

    assert sum(counts) == 32 and min(counts) > 0
    assert unshared == [0, 0]
    assert len({reply.placement.prefill.worker_id for reply in replies}) <= 2
    decodes = [reply.placement.decode.worker_id for reply in replies]
    assert decodes.count("d0") == decodes.count("d1") == 16


async def test_a_placement_the_routers_could_not_agree_on_is_kept_with_its_reason(
    config: RouterConfig, link: Bus, redis_url: str
) -> None:
    """Else nobody could tell why an idle fleet refused : another router keeps its turn."""
    own = replace(config, redis_url=redis_url.removesuffix("/0") + "/7", redis_timeout_s=5.0)
    wanted = placing()
    async with (
        aclosing(redis.from_url(own.redis_url)) as other,
        index_of(own),
        routing(own, link, fleet()) as router,
    ):
        await other.set("farspan:router:v1:turn", "another", px=5000)
        reply = await place(link, wanted)
        await other.delete("farspan:router:v1:turn")
        (record,) = router.decisions(wanted.request_id)
        left = router.details()["open_promises"]

    assert reply.failure.kind == pb.FAILURE_KIND_OVERLOADED
    assert record.withdrawn == reply.failure.message == "the routers could not agree in time"
    assert record.outcome.placement.prefill.worker_id == "p1"
    assert records.first_difference(record.outcome, records.replay(record)) == ""
    assert left == 0


async def test_a_router_without_its_redis_places_and_says_so(
    config: RouterConfig, link: Bus
) -> None:
    """Also when it starts: without a router there would be no placements at all."""
    own = replace(config, redis_url=f"redis://:secret@127.0.0.1:{free_port()}/0")
    async with index_of(own), routing(own, link, fleet()) as router:
        reply = await place(link, placing())
        is_ready, reason = router.state()
        counts = router.details()

    assert reply.HasField("placement")
    assert is_ready and "Redis is away" in reason and "secret" not in reason
    assert counts["placed_unshared"] == 1


async def test_any_router_is_asked_for_a_decision_and_the_one_that_made_it_replies(
    config: RouterConfig, link: Bus
) -> None:
    """By the request's id, and by those its client sees."""
    replies: asyncio.Queue[pb.DecisionReply] = asyncio.Queue()

    async def take(reply: pb.DecisionReply) -> None:
        replies.put_nowait(reply)

    async with (
        index_of(config, hit("p0", 15)),
        routing(config, link, fleet()),
        routing(config, link, fleet()),
        link.listen(subjects.DECISION_REPLY, take, gateway="gw-1"),
    ):
        wanted = placing(known_as=["chatcmpl-1"])
        placed = await place(link, wanted)
        refused = placing(known_as=["chatcmpl-2"])
        refused.model = "another"
        await place(link, refused)
        found = []
        for name in ("nobody's", wanted.request_id, "chatcmpl-1", "chatcmpl-2"):
            query = pb.DecisionQuery(id=name, reply_to="gw-1")
            await link.publish(subjects.DECISION_QUERY, query)
            if name != "nobody's":
                found.append((await asyncio.wait_for(replies.get(), 5)).records)
        await asyncio.sleep(0.05)

    by_id, by_alias, refusal = found
    assert replies.empty()
    assert by_id == by_alias
    assert by_id[0].outcome.placement == placed.placement
    assert by_id[0].inputs.hits[0].num_blocks == 15
    assert by_id[0].inputs.lifetime_s > 0
    assert not records.first_difference(by_id[0].outcome, records.replay(by_id[0]))
    assert refusal[0].outcome.failure.kind == pb.FAILURE_KIND_OVERLOADED


async def test_a_worker_that_joins_later_is_used(config: RouterConfig, link: Bus) -> None:
    """A router that started with an empty fleet is not stuck with it (C10, C11)."""
    async with index_of(config), routing(config, link, []) as router:
        before = await place(link, placing())
        for beat in fleet():
            await link.publish(subjects.HEARTBEAT, beat)
        await until(lambda: router.details()["workers"] == 3)
        after = await place(link, placing())

    assert before.failure.kind == pb.FAILURE_KIND_OVERLOADED
    assert after.HasField("placement")


async def test_a_request_that_cannot_be_in_time_is_told_so_at_once(
    config: RouterConfig, link: Bus
) -> None:
    """It would take a place in a queue for nothing."""
    busy = load(waiting_tokens=10**6, tokens_per_s=10_000)
    beats = [heartbeat("p0", pb.ROLE_PREFILL, load=busy), heartbeat("d0", pb.ROLE_DECODE)]
    async with index_of(config), routing(config, link, beats):
        reply = await place(link, placing())

    assert reply.failure.kind == pb.FAILURE_KIND_DEADLINE
    assert "takes 100.1 s" in reply.failure.message


async def test_two_routers_share_the_requests(config: RouterConfig, link: Bus) -> None:
    """A queue group: each request has one answer, and one router may go at any time."""
    async with routing(config, link, fleet()) as first:
        async with routing(config, link, fleet()) as second:
            for _ in range(40):
                assert (await place(link, placing())).HasField("placement")
            counts = first.details()["placed"], second.details()["placed"]
            assert sum(counts) == 40 and min(counts) > 0
        assert (await place(link, placing())).HasField("placement")
    with pytest.raises(WorkerLost):
        await place(link, placing())


def test_the_process_does_not_start_without_nats() -> None:
    """One line that names what is missing and where it was expected, and exit code 2."""
    address = f"127.0.0.1:{free_port()}"
    settings = {"ROUTER_NATS_URL": f"nats://{address}", "ROUTER_KV_INDEX_ADDRESS": "127.0.0.1:1"}

    ended = subprocess.run(
        [sys.executable, "-m", "services.router"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert ended.returncode == 2
    assert "NATS" in ended.stderr.splitlines()[-1] and address in ended.stderr
    assert "Traceback" not in ended.stderr
