"""Ids remembered for a while."""

from shared.recent import Recent


def test_the_oldest_is_forgotten_first() -> None:
    """Memory is bounded, whatever arrives."""
    recent = Recent()

    for number in range(5000):
        recent.add(str(number))

    assert "4999" in recent
    assert "0" not in recent


def test_what_is_forgotten_was_never_added() -> None:
    recent = Recent()
    recent.add("a")

    recent.forget("a")
    recent.forget("b")

    assert "a" not in recent
