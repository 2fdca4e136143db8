import pytest

from benchmarks.gateway_speed import figures
from benchmarks.gateway_speed.client import Heard

HEARD = [Heard(0, 1.0, [1.5, 2.0, 3.0], 2), Heard(1, 2.0, [2.5, 3.0], 2)]
SENT = {"bench-0": [1.5, 1.75, 2.25], "bench-1": [2.25, 2.75]}


def test_tokens_count_from_the_first_request_to_the_last_token() -> None:
    """Requests that wait for acceptance are part of the rate."""
    assert figures.tokens_per_s(HEARD) == 5 / 2.0


def test_tokens_that_came_as_one_event_show() -> None:
    """Coalesced tokens would make a rate cheap."""
    assert figures.events_per_token(HEARD) == 4 / 5


def test_what_is_added_to_a_gap_is_apart_from_how_late_a_token_is() -> None:
    """A steady delay adds nothing to gaps, and a growing one does."""
    assert figures.added_gaps_ms(HEARD, SENT) == [250.0, 500.0, 0.0]
    assert figures.delays_ms(HEARD, SENT) == [0.0, 250.0, 750.0, 250.0, 250.0]


def test_the_first_token_counts_from_its_own_request() -> None:
    assert figures.first_token_p50_ms(HEARD) == 500.0


def test_a_token_without_its_sending_is_no_figure() -> None:
    """The mock's clock and the client's must tell of the same tokens."""
    with pytest.raises(ValueError, match="shorter"):
        figures.delays_ms(HEARD, {**SENT, "bench-1": [2.25]})
