"""Hot rows are an exact LRU keyed by host row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.kv.hot_rows import HotRows, Lookup

NUM_HOST_ROWS = 100


class Table:
    """Hot rows at device rows 1000.., with their scratch map."""

    def __init__(self, num_rows: int) -> None:
        self.rows = HotRows(2, np.arange(1000, 1000 + num_rows))
        self.scratch = np.full(NUM_HOST_ROWS, -1, np.int32)

    def look_up(self, *wanted: int, group_idx: int = 0) -> Lookup:
        found = self.rows.look_up(group_idx, np.array(wanted, np.int64), self.scratch)
        assert np.all(self.scratch == -1)
        return found


def test_a_row_is_fetched_once_and_found_afterwards() -> None:
    """Repeats in one step count once."""
    table = Table(4)

    first, second = table.look_up(7, 8, 7), table.look_up(8, 7)

    assert sorted(first.missing_host_rows) == [7, 8]
    assert first.device_rows[0] == first.device_rows[2]
    assert len(second.missing_host_rows) == 0
    assert list(second.device_rows) == [first.device_rows[1], first.device_rows[0]]


def test_groups_do_not_share_rows() -> None:
    """Another group's layers have fetched other planes."""
    table = Table(4)
    table.look_up(7)

    assert list(table.look_up(7, group_idx=1).missing_host_rows) == [7]


def test_a_rewritten_row_is_fetched_again() -> None:
    """Its copy is stale."""
    table = Table(4)
    table.look_up(7, 8)

    table.rows.forget(np.array([7]))

    assert list(table.look_up(7, 8).missing_host_rows) == [7]


def test_a_step_that_selects_more_than_there_is_room_for_is_refused() -> None:
    """Going on would evict rows that this step reads."""
    table = Table(2)

    with pytest.raises(RuntimeError, match="3 rows selected"):
        table.look_up(1, 2, 3)


@given(
    num_rows=st.integers(1, 12),
    steps=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), max_size=30),
)
def test_rows_leave_in_order_of_last_use(num_rows: int, steps: list[list[int]]) -> None:
    """Against a plain LRU; rows last used in the same step may leave in any order."""
    table = Table(num_rows)
    content: dict[int, int] = {}  # device row -> host row
    last_used: dict[int, int] = {}

    for tick, step in enumerate(steps):
        wanted = step[:num_rows]
        found = table.look_up(*wanted)

        assert set(found.missing_host_rows) == set(wanted) - set(content.values())
        assert found.num_hits == len(set(wanted)) - len(found.missing_host_rows)
        evicted = [content[r] for r in found.missing_device_rows.tolist() if r in content]
        kept = set(content.values()) - set(evicted) - set(wanted)
        assert all(last_used[e] <= last_used[k] for e in evicted for k in kept)
        if evicted:
            assert len(content) + len(found.missing_host_rows) - len(evicted) == num_rows
        content.update(
            zip(found.missing_device_rows.tolist(), found.missing_host_rows.tolist(), strict=True)
        )
        assert [content[row] for row in found.device_rows.tolist()] == wanted
        last_used.update((row, tick) for row in wanted)
