import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from google.protobuf import json_format

from services.router import records
from services.router.journal import Journal
from services.router.records import Inputs
from services.router.view import Rates
from shared import bus, subjects
from shared import farspan_pb2 as pb
from tests.services.gateway.stage import MODEL, staged
from tests.services.router.fleets import decode, prefill

TOKEN = "let-me-see"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def remembering(nats_url: str, *journals: Sequence[pb.PlaceRequest]) -> AsyncIterator[None]:
    """Routers, each of which decided these requests."""
    async with bus.connect(nats_url, "routers") as link:

        def listening(number: int, placed: Sequence[pb.PlaceRequest]):  # type: ignore[no-untyped-def]
            journal = Journal(f"router-{number}", 10, None)
            for place, request in enumerate(placed):
                bare, digest = records.without_hashes(request)
                fleet = [prefill("p0", model=MODEL), decode("d0", model=MODEL)]
                seen = Inputs(bare, digest, fleet, {}, Rates(), 60.0)
                journal.add(1000 - number + 10 * place, seen, records.judge(seen))

            async def answer(query: pb.DecisionQuery) -> None:
                found = journal.find(query.id)
                if found:
                    reply = pb.DecisionReply(records=found)
                    await link.publish(subjects.DECISION_REPLY, reply, gateway=query.reply_to)

            return link.listen(subjects.DECISION_QUERY, answer)

        opened = [listening(number, placed) for number, placed in enumerate(journals)]
        for one in opened:
            await one.__aenter__()
        try:
            yield
        finally:
            for one in opened:
                await one.__aexit__(None, None, None)


async def test_a_request_is_found_by_every_id_its_client_sees(nats_url: str) -> None:
    """The body's id, the header's, and the one in logs and traces."""
    async with staged(nats_url, debug_token=TOKEN) as stage:
        stage.plan("One.")
        answer = await stage.complete(priority=7)
        (placed,) = stage.fleet.places
        ids = [answer.json()["id"], answer.headers["x-request-id"], placed.request_id]
        async with remembering(nats_url, [], [placed]):
            found = [
                await stage.http.get(f"/debug/decisions/{each}", headers=HEADERS) for each in ids
            ]
            unknown = await stage.http.get("/debug/decisions/nobody's", headers=HEADERS)

    assert list(placed.known_as) == ids[:2]
    assert placed.priority == 7
    assert [each.status_code for each in found] == [200, 200, 200]
    assert [each.json()["id"] for each in found] == ids
    (decision,) = found[0].json()["decisions"]
    assert decision["routerId"] == "router-1"
    assert decision["outcome"]["placement"]["prefill"]["workerId"] == "p0"
    assert "blockHashes" not in decision["inputs"]["request"]
    record = json_format.ParseDict(decision, pb.DecisionRecord())
    assert not records.first_difference(record.outcome, records.replay(record))
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "decision_not_found"


async def test_attempts_that_went_through_several_routers_are_shown_in_order(
    nats_url: str,
) -> None:
    """A lost worker's request is placed again, by whichever router takes it."""
    first = pb.PlaceRequest(
        request_id="a", model=MODEL, num_prompt_tokens=9, max_new_tokens=1, known_as=["mine"]
    )
    second = pb.PlaceRequest()
    second.CopyFrom(first)
    second.request_id = "a-2"
    async with (
        staged(nats_url, debug_token=TOKEN) as stage,
        remembering(nats_url, [second], [first]),
    ):
        answer = await stage.http.get("/debug/decisions/mine", headers=HEADERS)

    decisions = answer.json()["decisions"]
    assert [each["inputs"]["request"]["requestId"] for each in decisions] == ["a", "a-2"]


@pytest.mark.parametrize(
    "authorization",
    ["", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", "Bearer \xe4"],
)
async def test_who_does_not_bear_the_token_learns_nothing(
    nats_url: str, authorization: str
) -> None:
    """Not even whether the request exists."""
    async with staged(nats_url, debug_token=TOKEN, is_empty=True) as stage:
        refused = await stage.http.get(
            "/debug/decisions/a", headers={"Authorization": authorization.encode("latin-1")}
        )

    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in refused.text


async def test_without_a_token_in_the_settings_there_is_no_such_page(nats_url: str) -> None:
    """An empty bearer token must not open it either."""
    async with staged(nats_url, is_empty=True) as stage:
        answers = [
            await stage.http.get("/debug/decisions/a", headers={"Authorization": given})
            for given in ("", "Bearer", "Bearer x")
        ]
        other = await stage.http.get("/debug/nothing")

    assert [answer.status_code for answer in answers] == [404, 404, 404]
    assert answers[0].json() == other.json()


async def test_several_may_ask_at_once(nats_url: str) -> None:
    """Each gets the answer to its own question."""
    placed = [
        pb.PlaceRequest(request_id=str(i), model=MODEL, num_prompt_tokens=9, max_new_tokens=1)
        for i in range(8)
    ]
    async with (
        staged(nats_url, debug_token=TOKEN, is_empty=True) as stage,
        remembering(nats_url, placed),
    ):
        answers = await asyncio.gather(
            *(stage.http.get(f"/debug/decisions/{i}", headers=HEADERS) for i in range(8))
        )

    for i, answer in enumerate(answers):
        (decision,) = answer.json()["decisions"]
        assert decision["inputs"]["request"]["requestId"] == str(i)
