"""GET /debug/decisions/{request id}: why a request went where it went, as its router stored it.

Open to who has the token or an operator's key: inputs tell of other requests' load, and ids of
clients. Without token and keys there is no such page.
"""

import asyncio
import hmac
import uuid
from contextlib import suppress
from dataclasses import dataclass

from google.protobuf import json_format
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from services.gateway.door.doorkeeper import CALLER
from services.gateway.door.keys import Caller
from services.gateway.failures import HttpFailure, openai_error
from shared import farspan_pb2 as pb
from shared import subjects
from shared.bus import Bus

PATH = "/debug/decisions/{request_id}"
_FIRST_REPLY_S = 0.5  # nobody says that he does not know; those who know do so in milliseconds
_OTHER_REPLIES_S = 0.1  # attempts of one request may have gone through several routers


@dataclass(frozen=True)
class Decisions:
    """The page. Call it with a request."""

    bus: Bus
    gateway_id: str
    token: str

    async def __call__(self, request: Request) -> JSONResponse:
        """The stored decisions of one request, in order."""
        caller: Caller = request.scope["state"][CALLER]
        if not caller.is_operator:
            if not self.token:
                raise HTTPException(404)
            if not self._is_allowed(request.headers.get("authorization", "")):
                raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"})
        request_id = request.path_params["request_id"]
        records = await self._ask(request_id)
        if not records:
            message = f"no router remembers a decision about {request_id!r}"
            failure = HttpFailure(404, message, code="decision_not_found")
            return JSONResponse(openai_error(failure), failure.status)
        decisions = [json_format.MessageToDict(record) for record in records]
        return JSONResponse({"id": request_id, "decisions": decisions})

    def _is_allowed(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # Compared in the same time whatever is given, so that time tells nothing of the token.
        is_right = hmac.compare_digest(given.strip().encode(), self.token.encode())
        return is_right and scheme.lower() == "bearer"

    async def _ask(self, request_id: str) -> list[pb.DecisionRecord]:
        """What all routers remember."""
        replies: asyncio.Queue[pb.DecisionReply] = asyncio.Queue()
        records: list[pb.DecisionRecord] = []
        reply_to = f"{self.gateway_id}-{uuid.uuid4().hex}"
        async with self.bus.listen(subjects.DECISION_REPLY, replies.put, gateway=reply_to):
            query = pb.DecisionQuery(id=request_id, reply_to=reply_to)
            await self.bus.publish(subjects.DECISION_QUERY, query)
            wait_s = _FIRST_REPLY_S
            with suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(wait_s):
                        records += (await replies.get()).records
                    wait_s = _OTHER_REPLIES_S
        return sorted(records, key=lambda record: record.decided_unix_ms)
