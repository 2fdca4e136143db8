from services.kv_index.repair import pause_s


def test_a_first_drift_is_healed_at_once_and_one_that_stays_ever_more_rarely() -> None:
    """But never given up: a worker may drift again before its digests have agreed."""
    pauses = [pause_s(num_heals) for num_heals in (0, 1, 2, 3, 7, 100_000)]

    assert pauses == [0, 1, 2, 4, 60, 60]
