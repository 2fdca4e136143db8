"""Which part of an offer is pulled next."""

from hypothesis import given
from hypothesis import strategies as st

from services.decode.pull_window import MAX_PULL_TOKENS, PullWindow


def test_whole_pages_move_while_later_ones_are_computed() -> None:
    window = PullWindow(num_tokens=300, num_ranks=4, interleave=64)

    assert window.end(0, 130, is_complete=False) == 128
    assert window.end(128, 150, is_complete=False) == 128


def test_interleaved_pages_move_with_their_effective_block() -> None:
    """One page of it would cost the reads of all four."""
    window = PullWindow(num_tokens=600, num_ranks=4, interleave=1)

    assert window.end(0, 255, is_complete=False) == 0
    assert window.end(64, 600, is_complete=False) == 512


def test_the_tail_of_a_page_moves_last() -> None:
    """A page in two pulls would be read twice."""
    window = PullWindow(num_tokens=300, num_ranks=1, interleave=64)

    assert window.end(0, 300, is_complete=False) == 256
    assert window.end(256, 300, is_complete=True) == 300


@given(
    num_tokens=st.integers(1, 20_000),
    num_ranks=st.integers(1, 16),
    interleave=st.sampled_from([1, 64]),
    held_pages=st.integers(0, 40),
    chunk=st.integers(1, 3000),
)
def test_pulls_join_and_end_with_the_prompt(
    num_tokens: int, num_ranks: int, interleave: int, held_pages: int, chunk: int
) -> None:
    """Each begins a page and is short; nothing that is not ready is read."""
    window = PullWindow(num_tokens, num_ranks, interleave)
    pulled, ready = min(held_pages * 64, (num_tokens - 1) // 64 * 64), 0
    while pulled < num_tokens:
        is_complete = ready >= num_tokens
        end = window.end(pulled, ready, is_complete=is_complete)
        if end == pulled:
            assert not is_complete, "stuck"
            ready += chunk
            continue
        assert pulled % 64 == 0
        assert end <= ready
        assert 0 < end - pulled <= MAX_PULL_TOKENS
        pulled = end
    assert pulled == num_tokens
