"""The ledger adds up."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.ledger import Usage, total

COUNTS = st.integers(0, 10**6)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS)


@given(st.lists(USAGES, max_size=5), st.lists(USAGES, max_size=5))
def test_a_total_is_the_sum_in_any_grouping(first: list[Usage], second: list[Usage]) -> None:
    """Nothing is counted twice or lost."""
    assert total([*first, *second]) == total([total(first), total(second)])
    assert total(first).total_tokens == sum(usage.total_tokens for usage in first)
