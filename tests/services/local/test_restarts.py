import pytest

from services.local.restarts import MAX_DEATHS, WINDOW_S, pause_s


def test_the_first_death_is_mended_at_once() -> None:
    """Somebody may be waiting for an answer."""
    assert pause_s([1000.0]) == 0.5


def test_pauses_grow_until_nothing_is_tried_any_more() -> None:
    """A process that cannot live must not keep the machine busy with its starts."""
    deaths_s = [float(i) for i in range(MAX_DEATHS)]

    pauses = [pause_s(deaths_s[: i + 1]) for i in range(MAX_DEATHS)]

    assert pauses == [0.5, 1.0, 2.0, 4.0, None]


@pytest.mark.parametrize("age_s", [WINDOW_S, 10 * WINDOW_S])
def test_what_is_long_past_does_not_count(age_s: float) -> None:
    """A process may die once an hour for ever."""
    assert pause_s([0.0, 0.0, 0.0, 0.0, age_s]) == 0.5


def test_what_is_just_within_the_window_counts() -> None:
    assert pause_s([0.0, 0.0, 0.0, 0.0, WINDOW_S - 1]) is None
