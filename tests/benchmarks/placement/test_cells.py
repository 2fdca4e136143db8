import pytest

from benchmarks.placement import cells


@pytest.mark.parametrize(("num_workers", "lanes", "num_seeds"), [(4, 8, 5), (8, 8, 4), (16, 16, 3)])
def test_cells_of_sessions_are_replayed_until_enough_requests_count(
    num_workers: int, lanes: int, num_seeds: int
) -> None:
    """A cell of fewer would be decided by luck."""
    cell = cells.session_cell([], num_workers, lanes, 2**20)

    assert len(cell.workloads) == num_seeds
    assert num_seeds * cell.setup.num_requests >= 5000 > (num_seeds - 1) * cell.setup.num_requests
