import json
from pathlib import Path

import pytest
import zstandard

from benchmarks.placement import traces


def write(path: Path, records: list[dict[str, object]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(zstandard.compress(lines.encode()))


def recorded(t: float, num_tokens: int, **more: object) -> dict[str, object]:
    ids = list(range(1, num_tokens // 64 + 1))
    return {"t": t, "in": num_tokens, "out": 5, "hash_ids": ids, "api_time": 2.0, **more}


def test_a_session_keeps_order_pauses_and_subagents(tmp_path: Path) -> None:
    """A subagent begins some time after the turn of its parent that called it."""
    subagent = {"t": 16.0, "requests": [recorded(0, 640), recorded(3, 700, think_time=1.5)]}
    requests = [recorded(0, 1000), recorded(10, 1100, think_time=8.0), subagent, recorded(40, 1200)]
    write(tmp_path / traces.SESSIONS_FILE, [{"id": "s", "requests": requests}])

    (session,) = traces.load_sessions(tmp_path)

    parent, child = session.conversations
    assert [turn.num_tokens for turn in parent.turns] == [1000, 1100, 1200]
    assert [turn.pause_s for turn in parent.turns] == [0, 8, 0]
    assert child.after_turn == 1
    assert [turn.pause_s for turn in child.turns] == [4, 1.5]
    assert session.num_turns == 5
    assert session.num_nodes == 1200 // 64 + 1


def test_known_flaws_are_tolerated_and_over_long_requests_left_out(tmp_path: Path) -> None:
    """Some answers were recorded with no tokens; beyond 256,000 the published corpus drops."""
    requests = [recorded(0, 1000, out=0), recorded(5, 256_000), recorded(9, 2000)]
    write(tmp_path / traces.SESSIONS_FILE, [{"id": "s", "requests": requests}])

    (session,) = traces.load_sessions(tmp_path)

    turns = session.conversations[0].turns
    assert [turn.num_tokens for turn in turns] == [1000, 2000]
    assert turns[0].num_new_tokens == 1


def test_single_requests_keep_their_times_and_whole_blocks(tmp_path: Path) -> None:
    """A last id that covers part of a block is nobody else's."""
    record = {"timestamp": 1500, "input_length": 1300, "output_length": 7, "hash_ids": [4, 9, 11]}
    write(tmp_path / traces.REQUESTS_FILE, [record])

    (turn,) = traces.load_requests(tmp_path)

    assert turn.pause_s == 1.5
    assert turn.nodes.tolist() == [4, 9]


def test_missing_traces_are_a_clear_error(tmp_path: Path) -> None:
    """They are not part of the repository."""
    with pytest.raises(traces.TracesMissing, match=r"no trace at .*claude-code"):
        traces.load_sessions(tmp_path)
