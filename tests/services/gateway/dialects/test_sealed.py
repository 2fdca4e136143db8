"""Reasoning that clients carry comes back as it was."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.dialects.sealed import seal, unseal


@settings(max_examples=50)
@given(st.text(max_size=50))
def test_what_was_sealed_comes_back(text: str) -> None:
    """Whatever the model thought."""
    assert unseal(seal(text)) == text


@pytest.mark.parametrize("foreign", ["", "gAAAAABo", "farspan-1.%%%", "farspan-1._w=="])
def test_what_was_not_sealed_here_is_not_read(foreign: str) -> None:
    """Another server's secrets stay unread, and broken ones too."""
    assert unseal(foreign) is None
