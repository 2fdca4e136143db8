"""What recent requests did and when, for people who ask why one was slow.

Pure: the exchange writes a request's timeline while it runs; the last ones are kept in memory.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from services.gateway.ledger import Usage
from shared import farspan_pb2 as pb

MAX_KEPT = 512


@dataclass(frozen=True)
class Stage:
    """A stretch of time that one worker, or the gateway, spent on a request."""

    name: str  # as its span is called
    worker: str
    attempt: int  # 1 for the first
    begin_unix_us: int
    end_unix_us: int
    num_tokens: int = 0  # computed, pulled or generated in it; 0 where that means nothing


@dataclass
class Timeline:
    """One request, from its body's arrival. Written by its exchange only."""

    id: str
    tenant: str
    begin_unix_us: int
    first_token_unix_us: int | None = None
    end_unix_us: int | None = None  # None while it runs
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    stages: list[Stage] = field(default_factory=list)

    def note_stages(self, told: Iterable[pb.Stage], worker: str, attempt: int) -> None:
        """Take in what a worker told of itself."""
        self.stages += [
            Stage(
                stage.name,
                worker,
                attempt,
                stage.begin_unix_us,
                stage.end_unix_us,
                stage.num_tokens,
            )
            for stage in told
        ]

    def as_json(self) -> dict[str, Any]:
        """For the timeline's reader; stages in the order in which they began."""
        return {
            "id": self.id,
            "attempts": self.attempts,
            "begin_unix_us": self.begin_unix_us,
            "first_token_unix_us": self.first_token_unix_us,
            "end_unix_us": self.end_unix_us,
            "usage": asdict(self.usage),
            "stages": [
                asdict(stage)
                for stage in sorted(self.stages, key=lambda one: (one.begin_unix_us, one.name))
            ],
        }


class Timelines:
    """The timelines of the last requests, running ones included, each under several ids."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._kept: deque[tuple[Timeline, tuple[str, ...]]] = deque()
        self._by_id: dict[tuple[str, str], Timeline] = {}

    def add(self, timeline: Timeline, known_as: Iterable[str] = ()) -> None:
        """Keep a request's timeline, to be found by its own id and those that its client sees.

        Clients choose ids: of two requests of one tenant with the same id, the later one is found.
        """
        ids = (timeline.id, *known_as)
        self._kept.append((timeline, ids))
        for name in ids:
            self._by_id[timeline.tenant, name] = timeline
        while len(self._kept) > self._max_kept:
            self._forget(*self._kept.popleft())

    def find(self, name: str, tenant: str) -> Timeline | None:
        """The tenant's request of this id; None for unknown ids and for other tenants' alike."""
        return self._by_id.get((tenant, name))

    def _forget(self, timeline: Timeline, ids: tuple[str, ...]) -> None:
        for name in ids:
            if self._by_id.get((timeline.tenant, name)) is timeline:
                del self._by_id[timeline.tenant, name]
