"""A service that NATS's own tools can find, by the conventions of ADR-32 of NATS (nats.micro).

Answers $SRV.PING, INFO and STATS, to all, to those who ask for its name, and for its id. The
endpoint itself is an ordinary answer on the bus, counted here.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shared.bus import Bus
from shared.subjects import MessageT, ReplyT, RequestSubject

_PREFIX = "$SRV"
_QUEUE = "q"  # the queue group of all NATS services


@dataclass
class NatsService:
    """One instance of a service with one endpoint."""

    name: str
    version: str  # of the endpoint's contract, SemVer
    description: str
    details: Callable[[], Mapping[str, int]]  # the service's own counters, shown in STATS
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))
    _num_requests: int = 0
    _num_errors: int = 0
    _last_error: str = ""
    _processing_ns: int = 0

    @asynccontextmanager
    async def answering(
        self,
        bus: Bus,
        subject: RequestSubject[MessageT, ReplyT],
        handler: Callable[[MessageT], Awaitable[ReplyT]],
    ) -> AsyncIterator[None]:
        """Inside the block, be found and answer requests, shared with the other instances."""

        async def counted(message: MessageT) -> ReplyT:
            begun_ns = time.perf_counter_ns()
            self._num_requests += 1
            try:
                return await handler(message)
            except Exception as error:
                self._num_errors += 1
                self._last_error = type(error).__name__
                raise
            finally:
                self._processing_ns += time.perf_counter_ns() - begun_ns

        endpoint = {"name": self.name, "subject": subject.name(), "queue_group": _QUEUE}
        verbs: dict[str, Callable[[], dict[str, Any]]] = {
            "PING": dict,
            "INFO": lambda: self._info(endpoint),
            "STATS": lambda: self._stats(endpoint),
        }
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(bus.answer(subject, counted, queue=_QUEUE))
            for verb, body in verbs.items():
                answer = self._answer(verb, body)
                for scope in ("", f".{self.name}", f".{self.name}.{self.instance_id}"):
                    await stack.enter_async_context(
                        bus.answer_text(f"{_PREFIX}.{verb}{scope}", answer)
                    )
            yield

    def _answer(self, verb: str, body: Callable[[], dict[str, Any]]) -> Callable[[], str]:
        head = {
            "type": f"io.nats.micro.v1.{verb.lower()}_response",
            "name": self.name,
            "id": self.instance_id,
            "version": self.version,
            "metadata": {},
        }
        return lambda: json.dumps(head | body())

    def _info(self, endpoint: dict[str, Any]) -> dict[str, Any]:
        return {"description": self.description, "endpoints": [endpoint | {"metadata": {}}]}

    def _stats(self, endpoint: dict[str, Any]) -> dict[str, Any]:
        counted = {
            "num_requests": self._num_requests,
            "num_errors": self._num_errors,
            "last_error": self._last_error,
            "processing_time": self._processing_ns,
            "average_processing_time": self._processing_ns // max(1, self._num_requests),
            "data": dict(self.details()),
        }
        started = self._started.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"started": started, "endpoints": [endpoint | counted]}
