"""The generating endpoints as ASGI applications: one span and one ending for every request.

An exchange ends with a whole response, an error object, or a client that left; never without.
"""

import asyncio
import logging
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.exchange import Dialect, Exchange, Resources
from services.gateway.failures import ShuttingDown
from services.gateway.dialects.openai import ChatRequest, CompletionRequest, parse
from services.gateway.dialects.replies import ChatReplies, CompletionReplies
from services.gateway.wire import ClientGone, Response, read_body, until_gone
from shared import telemetry
from shared.errors import FarspanError

logger = logging.getLogger(__name__)

CLIENT_ID = "client_id"  # where a connection's state holds its x-request-id
CHAT = Dialect("chat", lambda body: parse(ChatRequest, body), ChatReplies)
COMPLETION = Dialect(
    "text_completion", lambda body: parse(CompletionRequest, body), CompletionReplies
)


@dataclass(frozen=True)
class Endpoint:
    """One generating endpoint; each call is one exchange."""

    resources: Resources
    dialect: Dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to its end."""
        headers = Headers(scope=scope)
        response = Response(send)
        model = self.resources.config.model_name
        name = f"{self.dialect.operation} {model}"
        attributes: dict[str, telemetry.AttributeValue] = {
            "gen_ai.operation.name": self.dialect.operation,
            "gen_ai.provider.name": "farspan",
            "gen_ai.request.model": model,
        }
        with telemetry.attached(headers), telemetry.span(name, span_kind="server") as span:
            client_id = scope.get("state", {}).get(CLIENT_ID, "")
            exchange = Exchange(self.resources, self.dialect, response, span, client_id)
            span.set(**attributes, **{"farspan.request_id": exchange.request_id})
            try:
                body = await read_body(receive, self.resources.config.max_body_bytes)
                await until_gone(exchange.run(body, headers), receive)
            except ClientGone as error:
                span.set(**{"error.type": "client_left"})
                logger.info("%s: %s", exchange.request_id, error)
            except FarspanError as error:
                await exchange.fail(error)
            except asyncio.CancelledError:
                # The drain has lasted long enough. This task ends with the answer to its client.
                await exchange.fail(ShuttingDown())
            except Exception:
                logger.exception("%s failed", exchange.request_id)
                await exchange.fail(FarspanError("internal error"))
