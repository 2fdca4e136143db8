"""Whether anybody still waits for the work that a thread does."""

import threading
from contextvars import ContextVar

from shared.errors import Cancelled

given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)


def check_wanted() -> None:
    """Raise Cancelled if nobody waits any more for the work that calls this."""
    unwanted = given_up.get()
    if unwanted is not None and unwanted.is_set():
        raise Cancelled("nobody waits for this any more")
