"""Logprobs of tokens and of the likeliest ones, in one order everywhere."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.likeliest import likeliest, message, of_rows


@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 40), num_top=st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_the_likeliest_are_those_of_a_sort_and_sums_those_of_fp64(
    seed: int, num_rows: int, num_top: int
) -> None:
    """Many ties, both zeros and negative logits; the lower id comes first."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-6, 7, (num_rows, 50), generator=generator) / 4
    logits[:, 3] = -0.0
    token_ids = torch.randint(0, 50, (num_rows,), generator=generator)

    found = likeliest(logits, token_ids, num_top)

    exact = torch.log_softmax(logits.double(), -1)
    for row in range(num_rows):
        order = sorted(range(50), key=lambda token: (-float(logits[row, token]), token))
        assert found.token_ids[row].tolist() == order[:num_top]
        wanted = exact[row, order[:num_top]].tolist()
        assert found.logprobs[row].tolist() == pytest.approx(wanted, abs=1e-5)
        assert float(found.chosen[row]) == pytest.approx(
            float(exact[row, token_ids[row]]), abs=1e-5
        )


def test_rows_tell_the_same_alone_and_together() -> None:
    """Bit for bit, and also where other rows ask for more."""
    logits = torch.randn((21, 300), generator=torch.Generator().manual_seed(1))
    together = likeliest(logits, torch.arange(21), 9).numbers().numpy()

    for row in range(21):
        assert message(together[row : row + 1], 4) == of_rows(logits[row : row + 1], [row], 4)


def test_the_wire_holds_little_endian_numbers() -> None:
    told = of_rows(torch.tensor([[0.0, 1.0, 1.0]]), [0], 2)

    assert told.num_top == 2
    assert np.frombuffer(told.top_token_ids, "<u4").tolist() == [1, 2]
    assert np.frombuffer(told.chosen, "<f4").tolist() == pytest.approx([-1.86199], abs=1e-4)
    assert np.frombuffer(told.top_logprobs, "<f4").tolist() == pytest.approx(
        [-0.86199, -0.86199], abs=1e-4
    )
