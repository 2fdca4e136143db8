"""How a compute process uses its cores."""

import torch

from shared.engine import compute_threads


def test_an_operator_s_choice_stands() -> None:
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}

    compute_threads.calm_openmp(environ)

    assert environ == {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "0"}


def test_torch_computes_with_the_threads_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        compute_threads.settle(1)
        assert torch.get_num_threads() == 1
    finally:
        compute_threads.settle(before)
