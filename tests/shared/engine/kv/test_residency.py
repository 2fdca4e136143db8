"""What a sequence costs on the device, mode by mode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.kv.residency import ResidencyMode, make_policy
from shared.errors import ConfigError


def test_a_short_sequence_costs_its_own_pages_and_a_long_one_its_hot_rows() -> None:
    """Two tail pages and four hot pages stand for any length beyond six blocks."""
    policy = make_policy(ResidencyMode.MIXED, hot_rows=256, union_rows=256, num_device_pages=100)

    assert [policy.device_pages(n) for n in (1, 64, 65, 384, 385, 1_000_000)] == [1, 1, 2, 6, 6, 6]


def test_all_resident_costs_every_page() -> None:
    """Nothing is ever unpinned, so nothing is leased."""
    policy = make_policy(
        ResidencyMode.ALL_RESIDENT, hot_rows=64, union_rows=64, num_device_pages=100
    )

    assert policy.device_pages(6400) == 100
    assert policy.max_sequence_tokens(num_host_pages=1000, num_device_pages=100) == 6400


def test_all_host_leases_from_the_third_block_on() -> None:
    """Only the two tail pages stay."""
    policy = make_policy(ResidencyMode.ALL_HOST, hot_rows=64, union_rows=64, num_device_pages=100)

    assert [policy.device_pages(64 * n) for n in (1, 2, 3, 99)] == [1, 2, 3, 3]


@given(
    mode=st.sampled_from(ResidencyMode),
    hot_pages=st.integers(1, 20),
    num_device_pages=st.integers(1, 60),
    num_host_pages=st.integers(1, 60),
)
def test_the_longest_sequence_fits_and_the_next_does_not(
    mode: ResidencyMode, hot_pages: int, num_device_pages: int, num_host_pages: int
) -> None:
    """The gateway refuses by this limit, so it must be neither too high nor too low."""
    policy = make_policy(
        mode, hot_rows=64 * hot_pages, union_rows=1, num_device_pages=num_device_pages
    )

    def fits(num_tokens: int) -> bool:
        has_host_room = -(-num_tokens // 64) <= num_host_pages
        return has_host_room and policy.device_pages(num_tokens) <= num_device_pages

    longest = policy.max_sequence_tokens(num_host_pages, num_device_pages)

    assert fits(longest)
    assert not fits(longest + 1)


@pytest.mark.parametrize("hot_rows", [0, 65, 192])
def test_hot_rows_that_cannot_serve_a_step_are_refused(hot_rows: int) -> None:
    """A row could be evicted before it is read."""
    with pytest.raises(ConfigError, match="hot rows"):
        make_policy(ResidencyMode.MIXED, hot_rows=hot_rows, union_rows=193, num_device_pages=100)
