"""The generating endpoints as ASGI applications: one span and one ending for every request.

An exchange ends with a whole response, an error object, or a client that left; never without.
"""

import asyncio
import logging
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.dialects.dialect import Dialect
from services.gateway.door.doorkeeper import VISIT
from services.gateway.door.limits import Visit
from services.gateway.exchange import Exchange, Resources
from services.gateway.failures import ShuttingDown
from services.gateway.record import Client
from services.gateway.wire import ClientGone, Response, read_body, until_gone
from shared import telemetry
from shared.errors import FarspanError

logger = logging.getLogger(__name__)

CLIENT_ID = "client_id"  # where a connection's state holds its x-request-id


@dataclass(frozen=True)
class Endpoint:
    """One generating endpoint; each call is one exchange."""

    resources: Resources
    dialect: Dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to its end."""
        headers = Headers(scope=scope)
        response = Response(send, self.dialect.keep_alive)
        model = self.resources.config.model_name
        name = f"{self.dialect.operation} {model}"
        attributes: dict[str, telemetry.AttributeValue] = {
            "gen_ai.operation.name": self.dialect.operation,
            "gen_ai.provider.name": "farspan",
            "gen_ai.request.model": model,
        }
        with (
            self.resources.metrics.in_flight.track_inprogress(),
            telemetry.attached(headers),
            telemetry.span(name, span_kind="server") as span,
        ):
            state = scope["state"]
            visit: Visit = state[VISIT]
            client = Client(visit.caller.tenant, state[CLIENT_ID], visit)
            exchange = Exchange(self.resources, self.dialect, response, span, client)
            span.set(**attributes, **{"farspan.request_id": exchange.request_id})
            try:
                visit.enter_queue()
                body = await read_body(receive, self.resources.config.max_body_bytes)
                await until_gone(exchange.run(body, headers), receive)
            except ClientGone:
                exchange.leave()
            except FarspanError as error:
                await exchange.fail(error)
            except asyncio.CancelledError:
                # The drain has lasted long enough. This task ends with the answer to its client.
                await exchange.fail(ShuttingDown())
            except Exception:
                logger.exception("%s failed", exchange.request_id)
                await exchange.fail(FarspanError("internal error"))
