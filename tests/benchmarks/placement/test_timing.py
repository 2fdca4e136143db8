import pytest

from benchmarks.placement import timing


@pytest.mark.parametrize(
    ("num_new", "num_context", "milliseconds"),
    [
        pytest.param(8192, 0, 278, id="a-point-of-the-table"),
        pytest.param(16, 0, 105, id="a-tiny-step-is-bound-by-launches"),
        pytest.param(1280, 102_400, 138, id="between-columns"),
        pytest.param(8192, 149_504, 385.5, id="between-rows"),
        pytest.param(16_384, 524_288, 905, id="the-last-point"),
    ],
)
def test_prefill_takes_what_the_published_table_says(
    num_new: int, num_context: int, milliseconds: float
) -> None:
    """Interpolated between its points."""
    assert timing.prefill_step_s(num_new, num_context) == pytest.approx(milliseconds / 1000)


def test_decode_and_link_follow_their_published_figures() -> None:
    """49 ms a step with 16 requests; 100,000 tokens are 5.5 GB."""
    assert timing.decode_s(299, 16) == pytest.approx(4.9)
    assert timing.import_s(100_000) == pytest.approx(0.137, rel=0.01)
