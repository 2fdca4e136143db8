"""What an offer is refused with once it has been read."""

from shared import farspan_pb2 as pb
from tests.services.decode.conftest import StartStage
from tests.services.decode.test_life import prompt


async def test_what_can_never_fit_is_too_long(stage: StartStage) -> None:
    async with stage() as running:
        side, pages = running.side, running.service.capacity.host_pages

        reply = await side.send(side.offer("r", prompt(100), max_new_tokens=pages * 64))

        assert reply.failure.kind == pb.FAILURE_KIND_TOO_LONG
        await running.is_back_to_base()


async def test_a_full_queue_is_overloaded(stage: StartStage) -> None:
    async with stage(max_concurrent=1, max_waiting=1) as running:
        side = running.side
        await side.accepted(side.offer("r1", prompt(10)))
        await side.accepted(side.offer("r2", prompt(10)))

        reply = await side.send(side.offer("r3", prompt(10)))

        assert reply.failure.kind == pb.FAILURE_KIND_OVERLOADED


async def test_an_id_that_is_taken_by_another_request_is_refused(stage: StartStage) -> None:
    async with stage() as running:
        side = running.side
        await side.accepted(side.offer("r", prompt(10)))

        reply = await side.send(side.offer("r", prompt(11)))

        assert reply.failure.kind == pb.FAILURE_KIND_BAD_REQUEST
