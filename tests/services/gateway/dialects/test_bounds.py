"""What is endless is refused before anything looks at it in detail."""

from typing import Any

import pytest

from services.gateway.dialects.bounds import MAX_ITEMS, MAX_VALUES, refuse_endless
from services.gateway.failures import InvalidRequest

MANY: list[Any] = [{}] * (MAX_ITEMS + 1)
VALUES = {str(number): number for number in range(MAX_VALUES + 1)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": MANY}, "messages"),
        ({"messages": [{"content": MANY}]}, "messages"),
        ({"messages": [{"tool_calls": MANY}]}, "messages"),
        ({"messages": [{"content": [{"content": MANY}]}]}, "messages"),
        ({"messages": [{"content": [{"input": VALUES}]}]}, "messages"),
        ({"input": MANY}, "input"),
        ({"input": [{"output": MANY}]}, "input"),
        ({"input": [{"summary": MANY}]}, "input"),
        ({"system": MANY}, "system"),
        ({"tools": [VALUES]}, "tools"),
        ({"response_format": {"json_schema": VALUES}}, "response_format"),
        ({"output_config": {"format": VALUES}}, "output_config"),
        ({"text": {"format": VALUES}}, "text"),
        ({"metadata": VALUES}, "metadata"),
    ],
)
def test_more_than_can_be_looked_at_is_refused(fields: dict[str, Any], param: str) -> None:
    """Wherever it lies."""
    with pytest.raises(InvalidRequest, match="more than") as refused:
        refuse_endless(fields)

    assert refused.value.param == param


def test_what_fits_passes() -> None:
    """The bounds are far beyond any context."""
    refuse_endless({"messages": MANY[1:], "tools": [], "input": "x" * 10**6, "system": None})
