"""What a step gives travels together, and waits for nothing."""

import asyncio

from services.decode.outbox import Outbox
from shared import bus, subjects
from shared import farspan_pb2 as pb
from shared.tasks import background


async def test_tokens_of_one_turn_are_one_message_for_each_gateway(nats_url: str) -> None:
    """The requests of a step are woken together; those of the next step are another message."""
    heard: dict[str, list[list[str]]] = {"a": [], "b": []}
    is_heard = asyncio.Event()

    async def hear(gateway_id: str, batch: pb.TokenBatch) -> None:
        heard[gateway_id].append([message.request_id for message in batch.messages])
        if [len(batches) for batches in heard.values()] == [2, 2]:
            is_heard.set()

    async def answer(turn: asyncio.Event, request_id: str, gateway_id: str) -> None:
        await turn.wait()
        outbox.put(pb.Tokens(request_id=request_id), gateway_id)

    async with (
        bus.connect(nats_url, "test") as link,
        link.listen(subjects.TOKENS, lambda batch: hear("a", batch), gateway="a"),
        link.listen(subjects.TOKENS, lambda batch: hear("b", batch), gateway="b"),
    ):
        outbox = Outbox(link)
        async with background(outbox.send()), asyncio.timeout(5):
            for _ in range(2):
                turn = asyncio.Event()
                places = [("1", "a"), ("2", "a"), ("3", "b"), ("4", "a")]
                async with asyncio.TaskGroup() as group:
                    for request_id, gateway_id in places:
                        group.create_task(answer(turn, request_id, gateway_id))
                    await asyncio.sleep(0)
                    turn.set()
            await is_heard.wait()

    assert heard == {"a": [["1", "2", "4"]] * 2, "b": [["3"]] * 2}
