"""What an API is to the rest of the gateway: a body becomes an Ask, an answer becomes documents.

Pure: an API knows its own shapes and nothing of workers, tokens or connections.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.gateway.ask import Ask, Json
from services.gateway.failures import HttpFailure
from services.gateway.ledger import Usage
from services.gateway.text.answer import Delta
from shared import farspan_pb2 as pb


class Event(NamedTuple):
    """One server-sent event."""

    data: Json
    name: str = ""  # APIs with named events


@dataclass(frozen=True)
class Opening:
    """What is known when the first token of a request is there."""

    usage: Usage  # prompt and cached tokens


@dataclass(frozen=True)
class Ending:
    """Why an answer ended."""

    reason: pb.FinishReason  # STOP or LENGTH
    stop: str | int | None = None  # the client's stop string or stop token id that ended it


class Replies(Protocol):
    """One request's responses. Choices are numbered prompt by prompt: `prompt * n + number`.

    The order of calls is the order of the stream: `begin`, then for each choice any number of
    `feed` and one `finish`, then `end`. Without a stream the same calls come before `whole`.
    Where the ask shows_prompt, a choice's first delta is its prompt.
    """

    @property
    def id(self) -> str:
        """The response's id."""

    @property
    def finish_words(self) -> list[str]:
        """The finish reasons told, one for each finished choice."""

    def begin(self, opening: Opening) -> list[Event]:
        """Events before any text."""

    def feed(self, choice: int, delta: Delta) -> list[Event]:
        """Events for a piece of a choice."""

    def finish(self, choice: int, ending: Ending) -> list[Event]:
        """Events that end a choice."""

    def end(self, usage: Usage) -> list[Event]:
        """The last events, when every choice has ended."""

    def fail(self, failure: HttpFailure) -> list[Event]:
        """The last events of a stream that fails, at whatever point."""

    def whole(self, usage: Usage) -> Json:
        """The response without a stream, of all that was fed."""


@dataclass(frozen=True)
class Call:
    """A parsed request and the form of its answer."""

    ask: Ask
    replies: Callable[[str], Replies]  # given the model's name


@dataclass(frozen=True)
class Dialect:
    """One generating endpoint."""

    operation: str  # gen_ai.operation.name
    read: Callable[[bytes], Call]  # raises InvalidRequest
    error: Callable[[HttpFailure], Json]  # the body of an error response
    last_words: bytes = b""  # after a stream's last event, never after an error
    keep_alive: bytes = b": keep-alive\n\n"
