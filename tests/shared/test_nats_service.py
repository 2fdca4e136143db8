import json
from typing import Any

import nats
import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from shared import bus, subjects
from shared import farspan_pb2 as pb
from shared.errors import Overloaded
from shared.nats_service import NatsService


async def ask(nats_url: str, subject: str) -> dict[str, Any]:
    client = await nats.connect(nats_url)
    try:
        return dict(json.loads((await client.request(subject, timeout=5)).data))
    finally:
        await client.close()


async def place(request: pb.PlaceRequest) -> pb.PlaceReply:
    if not request.request_id:
        raise Overloaded("full")
    return pb.PlaceReply(placement=pb.Placement(reason="only one"))


async def test_nats_tools_find_the_service_and_its_figures(nats_url: str) -> None:
    """The library's own classes read the answers; a person types `nats service stats`."""
    service = NatsService("test-router", "1.0.0", "Places.", lambda: {"refused": 3})
    async with (
        bus.connect(nats_url, "test") as link,
        service.answering(link, subjects.PLACE, place),
    ):
        reply = await link.request(subjects.PLACE, pb.PlaceRequest(request_id="r"), timeout_s=5)
        with pytest.raises(Overloaded):
            await link.request(subjects.PLACE, pb.PlaceRequest(), timeout_s=5)

        ping = ServicePing.from_dict(await ask(nats_url, "$SRV.PING.test-router"))
        by_id = f"test-router.{service.instance_id}"
        info = ServiceInfo.from_dict(await ask(nats_url, f"$SRV.INFO.{by_id}"))
        stats = ServiceStats.from_dict(await ask(nats_url, f"$SRV.STATS.{by_id}"))
        anyone = await ask(nats_url, "$SRV.PING")

    assert reply.placement.reason == "only one"
    assert (ping.name, ping.id, ping.version) == ("test-router", service.instance_id, "1.0.0")
    assert anyone["type"] == "io.nats.micro.v1.ping_response"
    assert info.endpoints[0].subject == subjects.PLACE.name()
    (endpoint,) = stats.endpoints
    assert (endpoint.num_requests, endpoint.num_errors) == (2, 1)
    assert endpoint.last_error == "Overloaded"
    assert endpoint.average_processing_time > 0
    assert endpoint.data == {"refused": 3}
