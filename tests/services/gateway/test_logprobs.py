"""Logprobs are unpacked whole or not at all."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.logprobs import unpack
from shared import farspan_pb2 as pb
from shared.errors import FarspanError

FLOATS = st.floats(-100, 0, width=32)


@given(data=st.data(), num_tokens=st.integers(0, 5), num_top=st.integers(0, 3))
def test_each_token_gets_its_own(data: st.DataObject, num_tokens: int, num_top: int) -> None:
    """In order, the likeliest first as they came."""
    own = data.draw(st.lists(FLOATS, min_size=num_tokens, max_size=num_tokens))
    size = num_tokens * num_top
    top = data.draw(st.lists(FLOATS, min_size=size, max_size=size))
    ids = list(range(size))
    message = pb.TokenLogprobs(
        num_top=num_top,
        chosen=array("f", own).tobytes(),
        top_token_ids=array("I", ids).tobytes(),
        top_logprobs=array("f", top).tobytes(),
    )

    found = unpack(message, num_tokens)

    assert [each.logprob for each in found] == own
    assert [pair for each in found for pair in each.top] == list(zip(ids, top, strict=True))
    with pytest.raises(FarspanError):
        unpack(message, num_tokens + 1)


@pytest.mark.parametrize("field", ["chosen", "top_token_ids", "top_logprobs"])
def test_half_a_number_is_an_error(field: str) -> None:
    """A cut message must not shift the others."""
    with pytest.raises(FarspanError):
        unpack(pb.TokenLogprobs(num_top=1, **{field: b"abc"}), 1)


def test_a_first_token_has_none() -> None:
    """NaN stands for it; nothing is likelier than nothing."""
    nan = array("f", [float("nan")]).tobytes()
    message = pb.TokenLogprobs(
        num_top=1, chosen=nan, top_token_ids=array("I", [0]).tobytes(), top_logprobs=nan
    )

    assert unpack(message, 1) == [(None, ())]
