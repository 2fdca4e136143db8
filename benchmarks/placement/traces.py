"""The recorded traces as plain data: sessions of turns, and single requests with their times.

Knows the two files' formats; knows no workers. A node is one trace block in its place in a chain:
in both files an id stands for everything before it too, so equal ids mean equal prefixes.
"""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

Nodes = npt.NDArray[np.int64]

SESSIONS_FILE = "claude-code-120.jsonl.zst"
REQUESTS_FILE = "mooncake-conversation.jsonl.zst"
# As the published 256k corpus: single requests that are longer, answer included, are left out.
MAX_SEQUENCE_TOKENS = 256_000


class TracesMissing(Exception):
    """The trace files are not where they were said to be."""


@dataclass(frozen=True)
class Turn:
    """One request as it was recorded."""

    nodes: Nodes  # full blocks only
    num_tokens: int
    num_new_tokens: int
    pause_s: float  # from the end of the turn before; of a single request: from the trace's start


@dataclass(frozen=True)
class Conversation:
    """Turns that follow one another; a subagent's begin some time after a turn of its parent."""

    turns: tuple[Turn, ...]
    after_turn: int = -1  # of the parent; -1: this is the parent


@dataclass(frozen=True)
class Session:
    """A parent conversation and its subagents', which share one numbering of blocks."""

    name: str
    num_nodes: int
    conversations: tuple[Conversation, ...]

    @property
    def num_turns(self) -> int:
        """Of all its conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)


def load_sessions(folder: Path) -> list[Session]:
    """The agent sessions, blocks of 64 tokens. Raises TracesMissing."""
    sessions = [_session(record) for record in _records(folder / SESSIONS_FILE)]
    return [session for session in sessions if session.conversations[0].turns]


def load_requests(folder: Path) -> list[Turn]:
    """The open-loop requests, blocks of 512 tokens. Raises TracesMissing."""
    return [
        Turn(
            # The last id covers what is left, so it is whole only if the length says so.
            nodes=_nodes(record["hash_ids"][: record["input_length"] // 512]),
            num_tokens=record["input_length"],
            num_new_tokens=max(1, record["output_length"]),
            pause_s=record["timestamp"] / 1000,
        )
        for record in _records(folder / REQUESTS_FILE)
        if _fits(record["input_length"], record["output_length"])
    ]


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open("rb") as packed:
            reader = zstandard.ZstdDecompressor().stream_reader(packed)
            for line in io.TextIOWrapper(reader, encoding="utf-8"):
                yield json.loads(line)
    except FileNotFoundError as error:
        raise TracesMissing(f"no trace at {path}: say where the traces are") from error


def _session(record: Mapping[str, Any]) -> Session:
    parent: list[Turn] = []
    subagents: list[Conversation] = []
    end_s = 0.0
    for request in record["requests"]:
        if "requests" in request:
            delay_s = max(0.0, request["t"] - end_s)
            turns = _turns(request["requests"], delay_s)
            if turns:
                subagents.append(Conversation(turns, after_turn=max(0, len(parent) - 1)))
            continue
        end_s = request["t"] + request.get("api_time", 0.0)
        parent += _turns([request])
    conversations = (Conversation(tuple(parent)), *subagents)
    ids = [turn.nodes.max(initial=0) for each in conversations for turn in each.turns]
    return Session(record["id"], int(max(ids, default=0)) + 1, conversations)


def _turns(requests: list[Mapping[str, Any]], delay_s: float = 0.0) -> tuple[Turn, ...]:
    turns = [
        Turn(
            nodes=_nodes(request["hash_ids"]),
            num_tokens=request["in"],
            num_new_tokens=max(1, request["out"]),  # a few were recorded with none
            pause_s=request.get("think_time") or 0.0,
        )
        for request in requests
        if _fits(request["in"], request["out"])
    ]
    if turns and delay_s:
        first = turns[0]
        turns[0] = Turn(first.nodes, first.num_tokens, first.num_new_tokens, delay_s)
    return tuple(turns)


def _fits(num_tokens: int, num_new_tokens: int) -> bool:
    return num_tokens > 0 and num_tokens + num_new_tokens <= MAX_SEQUENCE_TOKENS


def _nodes(ids: list[int]) -> Nodes:
    return np.array(ids, dtype=np.int64)
