"""The door of the gateway: nobody comes in unknown, unlimited, or through somebody's browser.

An ASGI application around all others. Every path but the probes is shut, one that does not exist
too. Inside, a connection's state holds who called and, for requests with a body, their visit.
"""

import base64
import binascii
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.door.keyring import Keyring
from services.gateway.door.keys import Caller
from services.gateway.door.limits import Turnstile, Visit
from services.gateway.door.origin import is_own_host, is_own_origin
from services.gateway.door.upload import Upload
from services.gateway.failures import HttpFailure, InvalidRequest, as_http, openai_error

PROBES = frozenset({"/livez", "/readyz", "/startupz", "/health"})
CALLER, VISIT = "caller", "visit"  # in a connection's state
_DEBUG = "/debug/"
_OPERATORS = (_DEBUG, "/metrics")  # they tell of others' requests
_READING = frozenset({"GET", "HEAD"})
_OPERATOR = Caller("debug-token", is_operator=True)
ErrorShape = Callable[[HttpFailure], Mapping[str, object]]


@dataclass(frozen=True)
class Rules:
    """Who may come in, and how."""

    keyring: Keyring | None  # None: everybody, as one nameless caller
    has_own_host_only: bool  # where nothing but the Host header tells a page on the web from us
    max_body_bytes: int
    body_timeout_s: float
    host_names: tuple[str, ...] = ()  # under which browsers know us
    debug_token: str = ""  # opens /debug/ beside the keys of operators
    error_shapes: Mapping[str, ErrorShape] = field(default_factory=dict)  # by a path's beginning


class Doorkeeper:
    """The door, with an application behind it."""

    def __init__(self, app: ASGIApp, rules: Rules, turnstile: Turnstile) -> None:
        self._app = app
        self._rules = rules
        self._turnstile = turnstile

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _is_probe(scope):  # without a key, so without a body: one that comes is not waited for
            upload = Upload(Headers(scope=scope), receive, send, self._rules.body_timeout_s)
            await self._app(scope, upload.receive, upload.send)
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        upload = Upload(headers, receive, send, self._rules.body_timeout_s)
        visit = None
        try:
            self._check_origin(headers)
            caller = self._identify(headers, scope["path"])
            self._check_operator(caller, scope["path"])
            upload.check(self._rules.max_body_bytes)
            state = scope.setdefault("state", {})
            state[CALLER] = caller
            if scope["method"] in _READING:
                await self._app(scope, upload.receive, upload.send)
                return
            state[VISIT] = visit = self._turnstile.enter(caller, time.monotonic())
            await self._app(scope, upload.receive, _telling(visit, upload.send))
        except InvalidRequest as error:
            if upload.is_answered:
                raise
            failure = as_http(error)
            body = self._shape(scope["path"])(failure)
            response = JSONResponse(body, failure.status, headers=failure.headers)
            await response(scope, upload.receive, upload.send)
        finally:
            if visit is not None:
                self._turnstile.leave(visit)

    def _check_origin(self, headers: Headers) -> None:
        """Raises InvalidRequest, 403, for what a page on the web has made a browser send."""
        host, names = headers.get("host", ""), self._rules.host_names
        origin = headers.get("origin")
        if origin is not None and not is_own_origin(origin, host, names):
            raise _forbidden("this is not a page of this gateway's", "origin_not_allowed")
        if self._rules.has_own_host_only and not is_own_host(host, names):
            told = "the Host header is no address; GATEWAY_HOST_NAMES lists the names allowed"
            raise _forbidden(told, "host_not_allowed")

    def _identify(self, headers: Headers, path: str) -> Caller:
        """Who calls. Raises InvalidRequest, 401."""
        if self._rules.keyring is None:
            return Caller()
        given = presented(headers)
        caller = self._rules.keyring.identify(given)
        if caller is None and path.startswith(_DEBUG) and self._is_debug_token(given):
            caller = _OPERATOR
        if caller is None:
            raise InvalidRequest(
                "no API key, or not a valid one",
                code="invalid_api_key",
                status=401,
                error_type="authentication_error",
                # A second challenge on the line, and Chromium asks for no key at all.
                headers={"www-authenticate": 'Basic realm="Farspan", charset="UTF-8"'},
            )
        return caller

    def _check_operator(self, caller: Caller, path: str) -> None:
        """Raises InvalidRequest, 403, for what only operators may read."""
        is_theirs = path.startswith(_OPERATORS) and self._rules.keyring is not None
        if is_theirs and not caller.is_operator:
            raise _forbidden("this needs an operator's key", "operator_only")

    def _is_debug_token(self, given: Sequence[str]) -> bool:
        token = self._rules.debug_token.encode()
        matches = [hmac.compare_digest(text.encode(), token) for text in given]
        return bool(token) and any(matches)

    def _shape(self, path: str) -> ErrorShape:
        for beginning, shape in self._rules.error_shapes.items():
            if path.startswith(beginning):
                return shape
        return openai_error


def presented(headers: Headers) -> list[str]:
    """Every key a request bears: as Bearer, x-api-key, or the password of any user (Basic)."""
    given = headers.getlist("x-api-key")
    for authorization in headers.getlist("authorization"):
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "bearer":
            given.append(value.strip())
        elif scheme.lower() == "basic":
            given += _password(value.strip())
    return given


def _password(encoded: str) -> list[str]:
    try:
        login = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return []
    return [login.partition(":")[2]]


def tenant_of(request: Request) -> str:
    """Whose request it is, behind the door."""
    caller: Caller = request.scope["state"][CALLER]
    return caller.tenant


def _is_probe(scope: Scope) -> bool:
    return scope["path"] in PROBES and scope["method"] in _READING


def _telling(visit: Visit, send: Send) -> Send:
    """Adds to a response what is left to the key."""
    if visit.caller.limits.is_free:
        return send

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            left = visit.headers(time.monotonic())
            told = [(name.encode(), value.encode()) for name, value in left.items()]
            given = {name for name, _ in message.get("headers", [])}
            new = [pair for pair in told if pair[0] not in given]
            message["headers"] = [*message.get("headers", []), *new]
        await send(message)

    return tell


def _forbidden(told: str, code: str) -> InvalidRequest:
    return InvalidRequest(told, code=code, status=403, error_type="permission_error")
