"""Grouped products give what experts one by one give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.gpu.experts import GroupedExperts
from shared.engine.model.layers import MlpWeights, mlp

WIDTH, INNER, NUM_EXPERTS = 32, 16, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.bfloat16).to(DEVICE)


GATE_UP = normal(NUM_EXPERTS, 2 * INNER, WIDTH, seed=1)
DOWN = normal(NUM_EXPERTS, WIDTH, INNER, seed=2)


def one_by_one(hidden: torch.Tensor, choice: torch.Tensor, first: int) -> torch.Tensor:
    outputs = torch.zeros((*choice.shape, WIDTH), device=DEVICE)
    for token, experts in enumerate(choice.tolist()):
        for slot, expert in enumerate(experts):
            if first <= expert < first + NUM_EXPERTS:
                gate_up, down = (weights[expert - first].float() for weights in (GATE_UP, DOWN))
                weights = MlpWeights(
                    lambda rows, w=gate_up: rows @ w.T, lambda rows, w=down: rows @ w.T
                )
                outputs[token, slot] = mlp(weights, hidden[token : token + 1].float())[0]
    return outputs


@given(
    st.lists(st.lists(st.integers(-1, 9), min_size=2, max_size=2, unique=True), max_size=20),
    st.sampled_from([0, 4]),
)
@settings(max_examples=40, deadline=None)
def test_each_chosen_expert_of_this_rank_is_computed_and_no_other(
    chosen: list[list[int]], first: int
) -> None:
    """Also when nobody chose any of ours, when one is chosen by all, and for no rows at all."""
    choice = torch.tensor(chosen, dtype=torch.int64, device=DEVICE).view(-1, 2)
    hidden = normal(len(chosen), WIDTH, seed=3)

    outputs = GroupedExperts(first, GATE_UP, DOWN)(hidden, choice)

    expected = one_by_one(hidden, choice, first)
    assert outputs.shape == (len(chosen), 2, WIDTH)
    # bf16 rounds the inner activations, of size up to some hundreds here.
    torch.testing.assert_close(outputs.float(), expected, rtol=0.05, atol=4.0)
    absent = (choice < first) | (choice >= first + NUM_EXPERTS)
    assert not outputs[absent].any(), "other ranks add theirs here"


@pytest.mark.gpu
def test_nothing_is_read_back() -> None:
    """A step that waits for the device leaves it idle."""
    experts = GroupedExperts(0, GATE_UP, DOWN)
    hidden, choice = normal(8, WIDTH, seed=4), torch.zeros((8, 2), dtype=torch.int64, device=DEVICE)
    experts(hidden, choice)

    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(hidden, choice)
    finally:
        torch.cuda.set_sync_debug_mode("default")
