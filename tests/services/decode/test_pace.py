"""The reported speed."""

import pytest

from services.decode.pace import Pace


def test_the_last_minute_of_work_counts() -> None:
    pace = Pace()
    assert pace.tokens_per_s == 0

    for _ in range(100):
        pace.note(1, 1.0)
    assert pace.tokens_per_s == pytest.approx(1.0)
    for _ in range(100):
        pace.note(4, 1.0)

    assert pace.tokens_per_s == pytest.approx(4.0)
