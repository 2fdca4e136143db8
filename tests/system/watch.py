"""What a running stack's processes tell one another, overheard: loads, submits, ends."""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import nats

from services.local.stack import Stack
from shared import bus, subjects
from shared import farspan_pb2 as pb
from shared.subjects import RequestSubject, Subject


@dataclass
class Watch:
    """Everything heard since it was opened, by request id."""

    nats_url: str
    latest: dict[str, pb.Heartbeat] = field(default_factory=dict)
    submits: Counter[str] = field(default_factory=Counter)
    offers: Counter[str] = field(default_factory=Counter)
    chunks: Counter[str] = field(default_factory=Counter)
    dones: Counter[str] = field(default_factory=Counter)
    cancels: Counter[str] = field(default_factory=Counter)
    placements_ended: Counter[str] = field(default_factory=Counter)
    end_senders: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    async def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        self.latest[heartbeat.worker.worker_id] = heartbeat

    async def on_end(self, tokens: pb.Tokens) -> None:
        self.end_senders[tokens.request_id].add(tokens.sender.worker_id)

    @property
    def num_waiting(self) -> dict[str, int]:
        """Requests that wait for room, by worker."""
        return {name: beat.load.num_waiting for name, beat in self.latest.items()}

    async def pools_at_base(self, within_s: float = 2.0) -> None:
        """Return when every worker and the router hold nothing; AssertionError if they keep it."""
        workers = set(self.latest)
        self.latest.clear()  # only what is said from now on counts
        deadline_s = time.monotonic() + within_s
        while True:
            held = {name: _held(beat.load) for name, beat in self.latest.items()}
            is_base = workers == set(held) and not any(held.values())
            if is_base and not (promises := await self._open_promises()):
                return
            if time.monotonic() > deadline_s:
                assert workers == set(held), f"heard of {sorted(held)} only"
                assert not any(held.values()), f"still held: {held}"
                assert not promises, f"the router still counts {promises} requests"
            await asyncio.sleep(0.05)

    async def eventually(self, condition: Callable[[], object], within_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, "it did not happen in time"
            await asyncio.sleep(0.005)

    async def _open_promises(self) -> int:
        client = await nats.connect(self.nats_url)
        try:
            reply = await client.request("$SRV.STATS.router", b"", timeout=2)
        finally:
            await client.close()
        (endpoint,) = json.loads(reply.data)["endpoints"]
        return int(endpoint["data"]["open_promises"])


@asynccontextmanager
async def watching(stack: Stack) -> AsyncIterator[Watch]:
    """A watch that knows every worker of the stack."""
    watch = Watch(stack.nats_url)

    def counting(counter: Counter[str]) -> Callable[[Any], Any]:
        async def count(message: Any) -> None:
            counter[message.request_id] += 1

        return count

    async with bus.connect(stack.nats_url, "watch") as link, AsyncExitStack() as subscriptions:
        for subscription in (
            link.listen(subjects.HEARTBEAT, watch.on_heartbeat),
            link.listen(_overheard(subjects.SUBMIT), counting(watch.submits), worker="*"),
            link.listen(_overheard(subjects.OFFER), counting(watch.offers), worker="*"),
            link.listen(subjects.CHUNK_READY, counting(watch.chunks), worker="*"),
            link.listen(_overheard(subjects.PREFILL_DONE), counting(watch.dones), worker="*"),
            link.listen(subjects.CANCEL, counting(watch.cancels), worker="*"),
            link.listen(subjects.PLACEMENT_ENDED, counting(watch.placements_ended)),
            link.listen(_overheard(subjects.TOKENS_END), watch.on_end, gateway="*"),
        ):
            await subscriptions.enter_async_context(subscription)
        workers = {name for name in stack.children if name.startswith(("prefill", "decode"))}
        await watch.eventually(lambda: set(watch.latest) == workers)
        yield watch


def _overheard(request: RequestSubject[Any, Any]) -> Subject[Any]:
    """A request's messages, without answering them."""
    return Subject(request.template, request.message_type)


def _held(load: pb.Load) -> dict[str, int]:
    """What is not as it is on an idle worker."""
    held = {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "waiting tokens": load.waiting_tokens,
        "blocks": load.total_blocks - load.free_blocks,
        "device pages": load.total_device_pages - load.free_device_pages,
        "index pages": load.total_index_pages - load.free_index_pages,
    }
    return {name: number for name, number in held.items() if number}
