"""How failures look to an HTTP client: status, words and headers.

Knows the failure tree of shared.errors; nothing else decides a status.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from math import ceil
from typing import Any

from shared.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    FarspanError,
    NoAnswer,
    Overloaded,
    TooLong,
    WorkerLost,
)

INVALID = "invalid_request_error"
TOO_LONG = "context_length_exceeded"
_MOST_WORDS, _MOST_MESSAGE = 100, 1000  # characters of a client's own in a message; of a message


class InvalidRequest(BadRequest):
    """A request refused at the door, with what the error object says about it."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = HTTPStatus.BAD_REQUEST,
        error_type: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        self.error_type = error_type
        self.headers = dict(headers or {})
        self.details: Mapping[str, Any] | None = None

    def rename(self, names: Mapping[str, str]) -> None:
        """Tell the parameter by the name that this API, or this request, has for it."""
        if self.param is not None and self.param in names:
            name = names[self.param]
            self.args = (str(self).replace(f"`{self.param}`", f"`{name}`"),)
            self.param = name


def unknown_model(name: str) -> InvalidRequest:
    """A model that is not the one served."""
    return InvalidRequest(
        f"the model {shortened(name)!r} does not exist",
        param="model",
        code="model_not_found",
        status=HTTPStatus.NOT_FOUND,
    )


class ShuttingDown(FarspanError):
    """The gateway stops before the answer has ended."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(frozen=True)
class HttpFailure:
    """A failure as HTTP tells it; each API puts it into its own error object."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] | None = None  # what a client's library must know to go on without


def shortened(text: str, most: int = _MOST_WORDS) -> str:
    """A client's own words for a message, which may be megabytes: their beginning."""
    return text if len(text) <= most else text[:most] + "…"


def openai_error(failure: HttpFailure) -> dict[str, Any]:
    """The OpenAI error object."""
    told = {
        "message": failure.message,
        "type": failure.kind,
        "param": failure.param,
        "code": failure.code,
    }
    return {"error": told}


def as_http(error: FarspanError) -> HttpFailure:
    """The answer a failure stands for."""
    message = shortened(str(error), _MOST_MESSAGE) or "the request failed"
    if isinstance(error, InvalidRequest):
        return HttpFailure(
            error.status,
            message,
            error.error_type,
            error.param,
            error.code,
            error.headers,
            error.details,
        )
    if isinstance(error, TooLong):
        return HttpFailure(400, message, code=TOO_LONG)
    if isinstance(error, BadRequest):
        return HttpFailure(400, message)
    if isinstance(error, Overloaded):
        seconds = max(1, ceil(error.retry_after_ms / 1000))
        return HttpFailure(
            429,
            message,
            "rate_limit_exceeded",
            code="overloaded",
            headers={"retry-after": str(seconds)},
        )
    if isinstance(error, NoAnswer):
        message = "no answer came in time from a worker or a router"  # its own words name subjects
    kinds = (_SERVER_ERRORS.get(kind) for kind in type(error).__mro__)
    status, code = next((found for found in kinds if found), (500, "internal_error"))
    headers = {"retry-after": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    return HttpFailure(status, message, "server_error", code=code, headers=headers)


_SERVER_ERRORS: dict[type, tuple[int, str]] = {
    WorkerLost: (503, "no_worker"),
    DeadlineExceeded: (504, "deadline_exceeded"),
    Cancelled: (503, "cancelled"),
    ShuttingDown: (503, "shutting_down"),
}
