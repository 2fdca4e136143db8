"""The gateway's wiring: routes, probes, and everything that lives as long as the process.

`serve` is the whole service as one context manager; leaving it drains the requests in flight.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import openapi
from services.gateway.attempt import Line
from services.gateway.config import GatewayConfig
from services.gateway.decisions import PATH as DECISIONS_PATH
from services.gateway.decisions import Decisions
from services.gateway.dialects.chat_replies import CHAT
from services.gateway.dialects.completion_replies import COMPLETION
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.messages_replies import MESSAGES, anthropic_error
from services.gateway.dialects.responses_replies import RESPONSES
from services.gateway.door.doorkeeper import Doorkeeper, tenant_of
from services.gateway.door.opened import Door, opened
from services.gateway.endpoint import CLIENT_ID, Endpoint
from services.gateway.exchange import Resources
from services.gateway.failures import HttpFailure, as_http, openai_error, unknown_model
from services.gateway.fleet import Fleet
from services.gateway.listener import listening
from services.gateway.mailroom import Mailroom
from services.gateway.metrics import CONTENT_TYPE, Metrics
from services.gateway.readiness import Readiness, hearing, watching
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text_endpoints import add_text_routes, max_model_len
from services.gateway.timelines import Timelines
from services.gateway.web.routes import Observed, add_page
from services.gateway.workshop import Workshop
from shared import bus, lifecycle, subjects, tasks
from shared import farspan_pb2 as pb

logger = logging.getLogger(__name__)

_ALIVE_S = 1.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
_ANTHROPIC = "/v1/messages"  # paths whose errors have its form


@dataclass(frozen=True)
class Serving:
    """A running gateway."""

    port: int
    health_port: int
    readiness: Readiness
    app: FastAPI


@asynccontextmanager
async def serve(config: GatewayConfig) -> AsyncIterator[Serving]:
    """The gateway, listening inside the block. Raises ConfigError for what is missing."""
    cache_bytes = config.tokenizer_cache_mib << 20
    tokenizer = await asyncio.to_thread(Tokenizer, config.checkpoint, cache_bytes)
    fleet = Fleet(config.model_name, config.heartbeat_timeout_s)
    readiness = Readiness()
    async with (
        Workshop() as workshop,
        opened(config, {_ANTHROPIC: anthropic_error}) as door,
        bus.connect(config.nats_url, f"gateway {config.id}", config.nats) as connection,
    ):
        mailroom = Mailroom(connection)
        line = Line(connection, mailroom, fleet, config.id, config.model_name)
        resources = Resources(config, tokenizer, line, Metrics(), Timelines(), workshop)
        app = build_app(resources, readiness, door)
        async with (
            mailroom.open(config.id),
            connection.listen(subjects.HEARTBEAT, hearing(line, readiness)),
            watching(line, readiness),
            lifecycle.health(config.host, config.health_port, readiness.read) as health_port,
            listening(app, config) as port,
            tasks.background(_say_alive(line)),
        ):
            try:
                yield Serving(port, health_port, readiness, app)
            finally:
                readiness.drain()


def build_app(resources: Resources, readiness: Readiness, door: Door) -> FastAPI:
    """All routes. Whatever is answered is JSON, errors included."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Doorkeeper, rules=door.rules, turnstile=door.turnstile)
    app.add_middleware(RequestIds)  # the last is outermost: who is refused gets an id, too
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    app.router.routes += [
        Route(path, Endpoint(resources, dialect), methods=["POST"])
        for path, dialect in DIALECTS.items()
    ]
    _add_models(app, resources)
    add_text_routes(app, resources)
    _add_metrics(app, resources.metrics)
    _add_document(app, resources.config.model_name)
    add_page(
        app,
        Observed(resources.line.fleet, resources.timelines, resources.line.clock, tenant_of),
    )
    line, config = resources.line, resources.config
    decisions = Decisions(line.bus, line.gateway_id, config.debug_token)
    app.add_api_route(DECISIONS_PATH, decisions.__call__, methods=["GET"])

    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    async def readyz() -> JSONResponse:
        is_ready, reason = readiness.read()
        return JSONResponse({"ready": is_ready, "reason": reason}, 200 if is_ready else 503)

    _add_get(app, "/livez", livez)
    _add_get(app, "/readyz", readyz)
    _add_get(app, "/startupz", readyz)
    _add_get(app, "/health", readyz)
    return app


def _add_models(app: FastAPI, resources: Resources) -> None:
    created = datetime.now(UTC).replace(microsecond=0)
    name = resources.config.model_name

    def model_object() -> dict[str, str | int]:
        return {
            "id": name,
            "object": "model",
            "created": int(created.timestamp()),
            "owned_by": "farspan",
            # What Anthropic's clients read of a model.
            "type": "model",
            "display_name": name,
            "created_at": created.isoformat().replace("+00:00", "Z"),
            "max_model_len": max_model_len(resources),
        }

    async def models() -> dict[str, object]:
        page = {"first_id": name, "last_id": name, "has_more": False}
        return {"object": "list", "data": [model_object()], **page}

    async def model(name: str) -> JSONResponse:
        if name == resources.config.model_name:
            return JSONResponse(model_object())
        failure = as_http(unknown_model(name))
        return JSONResponse(openai_error(failure), failure.status)

    _add_get(app, "/v1/models", models)
    _add_get(app, "/v1/models/{name:path}", model)


def _add_metrics(app: FastAPI, metrics: Metrics) -> None:
    async def scrape() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    _add_get(app, "/metrics", scrape)


def _add_document(app: FastAPI, model: str) -> None:
    async def described() -> JSONResponse:
        return JSONResponse(openapi.document(model))

    _add_get(app, "/openapi.json", described)


def _add_get(app: FastAPI, path: str, answer: Callable[..., Awaitable[object]]) -> None:
    """A route for reading; HEAD too, which load balancers ask."""
    app.add_api_route(path, answer, methods=["GET", "HEAD"])


class RequestIds:
    """Gives every response an x-request-id: the client's where harmless, else a fresh one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})[CLIENT_ID] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id  # Anthropic's name
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    failure = HttpFailure(
        error.status_code, str(error.detail), code=code, headers=error.headers or {}
    )
    return _failed(request, failure)


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    logger.error("a request failed", exc_info=error)
    failure = HttpFailure(500, "internal error", "server_error", code="internal_error")
    return _failed(request, failure)


def _failed(request: Request, failure: HttpFailure) -> JSONResponse:
    is_anthropic = request.url.path.startswith(_ANTHROPIC)
    told = anthropic_error(failure) if is_anthropic else openai_error(failure)
    return JSONResponse(told, failure.status, headers=dict(failure.headers))


async def _say_alive(line: Line) -> None:
    """For ever tell the routers that we end what we have placed."""
    alive = pb.GatewayAlive(gateway_id=line.gateway_id)
    while True:
        await line.bus.publish(subjects.GATEWAY_ALIVE, alive)
        await asyncio.sleep(_ALIVE_S)
