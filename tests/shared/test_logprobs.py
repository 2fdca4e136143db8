"""Logprobs of parts are those of the whole, however it was cut."""

import math
import struct

from hypothesis import given
from hypothesis import strategies as st

from shared import farspan_pb2 as pb
from shared.logprobs import joined, num_bytes, of_prompt


def of_tokens(first: int, end: int, num_top: int) -> pb.TokenLogprobs:
    """Made-up ones, different for each token."""
    return pb.TokenLogprobs(
        num_top=num_top,
        chosen=struct.pack(f"<{end - first}f", *range(first, end)),
        top_token_ids=b"".join(struct.pack("<I", place) * num_top for place in range(first, end)),
        top_logprobs=b"".join(struct.pack("<f", place) * num_top for place in range(first, end)),
    )


@given(st.lists(st.integers(1, 5), min_size=1), st.integers(0, 3))
def test_parts_put_together_are_the_whole(lengths: list[int], num_top: int) -> None:
    ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
    parts = [of_tokens(end - n, end, num_top) for end, n in zip(ends, lengths, strict=True)]

    assert joined(parts) == of_tokens(0, ends[-1], num_top)


def test_a_prompt_s_first_token_has_none_and_what_follows_the_prompt_is_left_out() -> None:
    told = of_prompt([of_tokens(1, 4, 2), of_tokens(4, 9, 2)], 2, 6)

    chosen = struct.unpack("<6f", told.chosen)
    assert math.isnan(chosen[0])
    assert chosen[1:] == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert struct.unpack("<12I", told.top_token_ids)[2:4] == (1, 1)
    told_bytes = len(told.chosen) + len(told.top_token_ids) + len(told.top_logprobs)
    assert told_bytes == num_bytes(6, 2)


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    assert math.isnan(struct.unpack("<f", of_prompt([], 0, 1).chosen)[0])
