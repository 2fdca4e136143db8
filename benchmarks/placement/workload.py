"""When which request arrives: lanes of sessions in a closed loop, or single requests by the clock.

Knows no workers and draws only from the seed it is given.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.placement.traces import Nodes, Session, Turn
from shared.block_hash import BLOCK_TOKENS

_MAX_PAUSE_S = 300.0  # the benchmark's cap on a session's idle time
_START_WITHIN_S = 60.0
_START_FROM, _START_TO = 0.25, 0.75  # a lane's first session is joined in its middle


@dataclass(frozen=True)
class Request:
    """A turn that arrives; `space` is the play of a session whose blocks it may share."""

    request_id: str
    conversation: str
    space: int
    num_nodes: int  # of the space
    node_tokens: int
    turn: Turn
    place: tuple[int, int, int]  # lane, conversation and turn within the session

    @property
    def nodes(self) -> Nodes:
        """Its full blocks, in order."""
        return self.turn.nodes

    @property
    def block_hashes(self) -> bytes:
        """What a gateway would send: 16 bytes for each full 64-token block."""
        per_node = self.node_tokens // BLOCK_TOKENS
        inner = np.arange(per_node, dtype=np.int64)
        numbers = (self.nodes[:, None] * per_node + inner).ravel()
        num_blocks = self.turn.num_tokens // BLOCK_TOKENS
        packed = np.full((num_blocks, 2), self.space + 1, dtype=np.int64)
        packed[: len(numbers), 1] = numbers
        # The blocks of a last, partial node are nobody else's.
        packed[len(numbers) :, 0] = -1 - int(self.request_id)
        packed[len(numbers) :, 1] = np.arange(num_blocks - len(numbers))
        return packed.tobytes()


Arrival = tuple[float, Request]


class Workload(Protocol):
    """Where requests come from."""

    def first(self) -> list[Arrival]:
        """What arrives whatever happens."""

    def ended(self, request: Request, now_s: float) -> list[Arrival]:
        """What arrives because this request has ended."""


class Lanes:
    """So many sessions live at once; a lane whose session has drained plays the next one.

    Every play has blocks of its own, as with the published cache bust.
    """

    def __init__(self, sessions: Sequence[Session], num_lanes: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._sessions = list(sessions)
        self._random.shuffle(self._sessions)
        self._num_lanes = num_lanes
        self._playing: dict[int, tuple[int, Session]] = {}  # lane -> play
        self._open: Counter[int] = Counter()  # lane -> conversations that go on
        self._num_plays = 0
        self._num_requests = 0

    def first(self) -> list[Arrival]:
        """The first turn of every lane."""
        arrivals = []
        for lane in range(self._num_lanes):
            num_turns = len(self._next(lane).conversations[0].turns)
            share = self._random.uniform(_START_FROM, _START_TO)
            start_s = self._random.uniform(0, _START_WITHIN_S)
            arrivals.append((start_s, self._request(lane, 0, int(share * num_turns))))
        return arrivals

    def ended(self, request: Request, now_s: float) -> list[Arrival]:
        """The next turn, subagents that the ended one started, or the next session."""
        lane, conversation, turn = request.place
        _, session = self._playing[lane]
        arrivals = []
        if conversation == 0:
            for index, other in enumerate(session.conversations):
                if index and other.after_turn == turn:
                    self._open[lane] += 1
                    arrivals.append(self._arrival(lane, index, 0, now_s))
        if turn + 1 < len(session.conversations[conversation].turns):
            arrivals.append(self._arrival(lane, conversation, turn + 1, now_s))
            return arrivals
        self._open[lane] -= 1
        if self._open[lane] == 0:
            self._next(lane)
            arrivals.append((now_s, self._request(lane, 0, 0)))
        return arrivals

    def _next(self, lane: int) -> Session:
        session = self._sessions[self._num_plays % len(self._sessions)]
        self._playing[lane] = (self._num_plays, session)
        self._open[lane] = 1
        self._num_plays += 1
        return session

    def _arrival(self, lane: int, conversation: int, turn: int, now_s: float) -> Arrival:
        request = self._request(lane, conversation, turn)
        return now_s + min(_MAX_PAUSE_S, request.turn.pause_s), request

    def _request(self, lane: int, conversation: int, turn: int) -> Request:
        play, session = self._playing[lane]
        self._num_requests += 1
        return Request(
            request_id=str(self._num_requests),
            conversation=f"{play}/{conversation}",
            space=play,
            num_nodes=session.num_nodes,
            node_tokens=BLOCK_TOKENS,
            turn=session.conversations[conversation].turns[turn],
            place=(lane, conversation, turn),
        )


class Clocked:
    """Single requests at their recorded times; who sent them is guessed (`_conversations`)."""

    node_tokens = 512

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._num_nodes = 1 + max(int(turn.nodes.max(initial=0)) for turn in turns)

    def first(self) -> list[Arrival]:
        """All of them."""
        names = _conversations(self._turns)
        return [
            (
                turn.pause_s,
                Request(
                    str(i + 1), names[i], 0, self._num_nodes, self.node_tokens, turn, (0, 0, i)
                ),
            )
            for i, turn in enumerate(self._turns)
        ]

    def ended(self, request: Request, now_s: float) -> list[Arrival]:
        """Nobody waits for anybody."""
        del request, now_s
        return []


def _conversations(turns: Sequence[Turn]) -> list[str]:
    """A name for each turn: that of the last one which had its second to last full block or later.

    Blocks that everybody has, as the system prompt's, tie nobody to anybody.
    """
    owner: dict[int, str] = {}
    shared = Counter(int(turn.nodes[0]) for turn in turns if len(turn.nodes))
    names = []
    for i, turn in enumerate(turns):
        own = [int(node) for node in turn.nodes if shared[int(node)] < 2]
        known = [owner[node] for node in reversed(own) if node in owner]
        name = known[0] if known else str(i)
        names.append(name)
        for node in own:
            owner[node] = name
    return names
