"""Grouped products give what experts one by one give."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.gpu.experts import DenseMlps, GroupedExperts, GroupedMlps
from shared.engine.gpu.fp8 import Fp8Mlps, fp8_matrix, joined
from shared.engine.model.layers import MlpWeights, mlp
from shared.engine.model.weights import StoredWeight
from tests.shared.engine.poison import poison_new_memory

WIDTH, INNER, NUM_EXPERTS = 32, 16, 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """What is not written must not count."""
    with pytest.MonkeyPatch.context() as patch:
        poison_new_memory(patch)
        yield


def normal(*shape: int, seed: int) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, torch.bfloat16)


def stored(*shape: int, seed: int) -> list[StoredWeight]:
    """Block-FP8 matrices, every one with a scale of its own."""
    codes = normal(*shape, seed=seed).float().mul(50).clamp(-448, 448).to(torch.float8_e4m3fn)
    return [
        StoredWeight(matrix, torch.full((1, 1), 0.02 + 0.005 * number))
        for number, matrix in enumerate(codes.cpu())
    ]


GATE, UP, DOWN = (
    stored(NUM_EXPERTS, *shape, seed=seed)
    for seed, shape in enumerate(((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)))
)


def dense(weights: list[StoredWeight]) -> torch.Tensor:
    return torch.stack([weight.dense() for weight in weights]).to(DEVICE, torch.bfloat16)


MLPS: dict[str, GroupedMlps] = {
    "bf16": DenseMlps(torch.cat((dense(GATE), dense(UP)), 1), dense(DOWN)),
    "block-fp8": Fp8Mlps(
        [
            joined(fp8_matrix(gate, DEVICE), fp8_matrix(up, DEVICE))
            for gate, up in zip(GATE, UP, strict=True)
        ],
        [fp8_matrix(down, DEVICE) for down in DOWN],
    ),
}


def one_by_one(hidden: torch.Tensor, choice: torch.Tensor, first: int) -> torch.Tensor:
    outputs = torch.zeros((*choice.shape, WIDTH), device=DEVICE)
    for token, experts in enumerate(choice.tolist()):
        for slot, expert in enumerate(experts):
            if first <= expert < first + NUM_EXPERTS:
                gate, up, down = (
                    part[expert - first].dense().to(DEVICE) for part in (GATE, UP, DOWN)
                )
                weights = MlpWeights(
                    partial(F.linear, weight=torch.cat((gate, up))), partial(F.linear, weight=down)
                )
                outputs[token, slot] = mlp(weights, hidden[token : token + 1].float())[0]
    return outputs


@pytest.mark.parametrize("mlps", MLPS.values(), ids=MLPS)
@given(
    chosen=st.lists(st.lists(st.integers(-1, 9), min_size=2, max_size=2, unique=True), max_size=20),
    first=st.sampled_from([0, 4]),
)
@settings(max_examples=40, deadline=None)
def test_each_chosen_expert_of_this_rank_is_computed_and_no_other(
    mlps: GroupedMlps, chosen: list[list[int]], first: int
) -> None:
    """Also when nobody chose any of ours, when one is chosen by all, and for no rows at all."""
    choice = torch.tensor(chosen, dtype=torch.int64, device=DEVICE).view(-1, 2)
    hidden = normal(len(chosen), WIDTH, seed=3)

    outputs = GroupedExperts(first, mlps)(hidden, choice)

    expected = one_by_one(hidden, choice, first)
    assert outputs.shape == (len(chosen), 2, WIDTH)
    # bf16 rounds the inner activations, of size up to some hundreds here.
    torch.testing.assert_close(outputs.float(), expected, rtol=0.05, atol=4.0)
    absent = (choice < first) | (choice >= first + NUM_EXPERTS)
    assert not outputs[absent].any(), "other ranks add theirs here"


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [8, 1024])
@pytest.mark.parametrize("mlps", MLPS.values(), ids=MLPS)
def test_nothing_is_read_back(mlps: GroupedMlps, num_tokens: int) -> None:
    """A step that waits for the device leaves it idle, and cannot be a CUDA graph."""
    experts = GroupedExperts(0, mlps)
    hidden = normal(num_tokens, WIDTH, seed=4)
    choice = torch.zeros((num_tokens, 2), dtype=torch.int64, device=DEVICE)
    choice[::3] = -1
    expected = experts(hidden, choice)
    graph = torch.cuda.CUDAGraph()

    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(hidden, choice)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        replayed = experts(hidden, choice)
    graph.replay()

    assert torch.equal(replayed, expected)
