"""Which shapes decode steps are captured for."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.gpu.step_graphs import page_sizes, row_sizes


@given(st.integers(1, 1000))
def test_every_batch_has_a_size_with_little_padding(max_rows: int) -> None:
    """At most half again as many rows as wanted, or twice as many of few."""
    sizes = row_sizes(max_rows)

    assert sizes == sorted(set(sizes)) and sizes[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert size < 2 * num_rows if num_rows <= 8 else size <= 1.5 * num_rows


@given(st.integers(1, 4096), st.integers(1, 40_000))
def test_every_context_has_a_size_up_to_four_times_its_own(topk: int, max_pages: int) -> None:
    """The smallest needs no choice, unless the pools hold less than that."""
    sizes = page_sizes(topk, max_pages)

    assert sizes == sorted(set(sizes)) and sizes[-1] == max_pages
    assert sizes[0] == min(max(topk // 64, 1), max_pages)
    assert all(after <= 4 * before for before, after in pairwise(sizes))
