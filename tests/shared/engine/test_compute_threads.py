"""How a compute process uses its cores."""

import pytest
import torch

from shared.engine import compute_threads, tiles
from tests import demo


def test_an_operator_s_choice_stands() -> None:
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}

    compute_threads.calm_openmp(environ)

    assert environ == {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "0"}


@pytest.mark.parametrize("num_threads", [1, 3])
def test_so_many_parts_are_computed_at_once(num_threads: int) -> None:
    """By threads of ours; torch's own would show in last bits."""
    parts: list[int] = []
    with demo.threads(2):
        compute_threads.settle(num_threads)

        tiles.spread(lambda part: parts.append(len(part)), range(6))

    assert parts == [6 // num_threads] * num_threads
    assert torch.get_num_threads() == 1
