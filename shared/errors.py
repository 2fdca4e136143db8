"""The tree of failures, and whose fault each is.

FarspanError
├── ConfigError        the operator's: a setting or a file is missing or wrong; the process exits
├── BadRequest         the client's; never retried
│   └── TooLong        can never fit
├── Overloaded         the fleet's, now; retried by the gateway only
├── WorkerLost         a worker, its epoch or its lease is gone; retried by the gateway only
│   └── NoAnswer       nobody answered; whether anybody heard is not known
├── DeadlineExceeded   the request's time is up
└── Cancelled          the client left
Everything else is our bug and ends the process, or the request where a request can be told apart.
"""

from shared import farspan_pb2 as pb


class FarspanError(Exception):
    """A failure with a defined answer; `kind` is its name on the wire."""

    kind: pb.FailureKind = pb.FAILURE_KIND_INTERNAL
    retry_after_ms: int = 0

    def as_failure(self) -> pb.Failure:
        """The wire form of this failure."""
        return pb.Failure(kind=self.kind, message=str(self), retry_after_ms=self.retry_after_ms)


class ConfigError(FarspanError):
    """A setting, file or dependency is missing or wrong; the message names it."""


class BadRequest(FarspanError):
    """The request itself is wrong."""

    kind = pb.FAILURE_KIND_BAD_REQUEST


class TooLong(BadRequest):
    """The request can never fit any worker."""

    kind = pb.FAILURE_KIND_TOO_LONG


class Overloaded(FarspanError):
    """Capacity exists but is taken."""

    kind = pb.FAILURE_KIND_OVERLOADED
    retry_after_ms = 1000


class WorkerLost(FarspanError):
    """A worker, its epoch or its lease is gone."""

    kind = pb.FAILURE_KIND_WORKER_LOST


class NoAnswer(WorkerLost):
    """A request had no answer in time, so it may or may not have been heard."""


class DeadlineExceeded(FarspanError):
    """The request's deadline passed."""

    kind = pb.FAILURE_KIND_DEADLINE


class Cancelled(FarspanError):
    """The client left or cancelled."""

    kind = pb.FAILURE_KIND_CANCELLED


_BY_KIND: dict[int, type[FarspanError]] = {
    error.kind: error
    for error in (BadRequest, TooLong, Overloaded, WorkerLost, DeadlineExceeded, Cancelled)
}


def from_failure(failure: pb.Failure) -> FarspanError:
    """The exception a wire failure stands for; unknown kinds become a plain FarspanError."""
    error = _BY_KIND.get(failure.kind, FarspanError)(failure.message)
    error.retry_after_ms = failure.retry_after_ms
    return error
