"""How failures look to an HTTP client: status, headers and the OpenAI error object.

Knows the failure tree of shared.errors; nothing else decides a status.
"""

from dataclasses import dataclass, field
from http import HTTPStatus
from math import ceil
from typing import Any

from shared.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    FarspanError,
    Overloaded,
    TooLong,
    WorkerLost,
)

INVALID = "invalid_request_error"
TOO_LONG = "context_length_exceeded"


class InvalidRequest(BadRequest):
    """A request refused at the door, with what the error object says about it."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = HTTPStatus.BAD_REQUEST,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class ShuttingDown(FarspanError):
    """The gateway stops before the answer has ended."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(frozen=True)
class HttpFailure:
    """A failure as it goes over HTTP."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def error_object(
    message: str, *, kind: str = INVALID, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The OpenAI error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_http(error: FarspanError) -> HttpFailure:
    """The answer a failure stands for."""
    message = str(error) or "the request failed"
    if isinstance(error, InvalidRequest):
        return HttpFailure(error.status, error_object(message, param=error.param, code=error.code))
    if isinstance(error, TooLong):
        return HttpFailure(400, error_object(message, code=TOO_LONG))
    if isinstance(error, BadRequest):
        return HttpFailure(400, error_object(message))
    if isinstance(error, Overloaded):
        seconds = max(1, ceil(error.retry_after_ms / 1000))
        body = error_object(message, kind="rate_limit_exceeded", code="overloaded")
        return HttpFailure(429, body, {"retry-after": str(seconds)})
    status, code = _SERVER_ERRORS.get(type(error), (500, "internal_error"))
    headers = {"retry-after": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    return HttpFailure(status, error_object(message, kind="server_error", code=code), headers)


_SERVER_ERRORS: dict[type[FarspanError], tuple[int, str]] = {
    WorkerLost: (503, "no_worker"),
    DeadlineExceeded: (504, "deadline_exceeded"),
    Cancelled: (503, "cancelled"),
    ShuttingDown: (503, "shutting_down"),
}
