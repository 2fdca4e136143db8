"""The same for any split: a few hundred of the many that the benchmark runs."""

from benchmarks import invariance


def test_every_api_tells_the_same_however_the_tokens_come_in() -> None:
    """Chat, completions, responses and messages, with calls, stops, thoughts and broken markup."""
    assert invariance.splits(640, seed=7) >= 640
