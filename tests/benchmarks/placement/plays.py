"""Small made-up sessions and requests for the tests of the replay."""

import numpy as np

from benchmarks.placement.traces import Conversation, Session, Turn
from benchmarks.placement.workload import Request


def turn(
    num_nodes: int, *, first: int = 0, pause_s: float = 1.0, rest: int = 10, answer: int = 20
) -> Turn:
    nodes = np.arange(first, first + num_nodes, dtype=np.int64)
    return Turn(nodes, num_nodes * 64 + rest, answer, pause_s)


def growing(num_turns: int, *, start: int = 40, step: int = 10) -> Conversation:
    return Conversation(tuple(turn(start + step * i) for i in range(num_turns)))


def session(name: str, num_turns: int = 5) -> Session:
    return Session(name, 1000, (growing(num_turns),))


def request(
    nodes: list[int], num_tokens: int | None = None, *, space: int = 0, request_id: str = "1"
) -> Request:
    return Request(
        request_id=request_id,
        conversation="c",
        space=space,
        num_nodes=1000,
        node_tokens=64,
        turn=Turn(np.array(nodes, np.int64), num_tokens or len(nodes) * 64 + 1, 20, 0.0),
        place=(0, 0, 0),
    )
