"""The router, and expert parallelism: contributions of all ranks are the whole."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.comm import RankGroup
from shared.engine.model.config import MoeConfig
from shared.engine.model.layers import MlpWeights, mlp
from shared.engine.model.linear import Linear
from shared.engine.model.moe import LocalExperts, MoeWeights, expert_range, moe, route

WIDTH, INNER = 16, 8
CONFIG = MoeConfig(
    num_experts=6,
    num_experts_per_token=2,
    num_shared_experts=1,
    intermediate_size=INNER,
    scaling_factor=2.5,
)


def random_mlp(generator: torch.Generator) -> MlpWeights:
    return MlpWeights(
        Linear(torch.randn((2 * INNER, WIDTH), generator=generator)),
        Linear(torch.randn((WIDTH, INNER), generator=generator)),
    )


def random_weights(seed: int = 0) -> MoeWeights:
    generator = torch.Generator().manual_seed(seed)
    return MoeWeights(
        router=Linear(torch.randn((CONFIG.num_experts, WIDTH), generator=generator)),
        correction_bias=torch.randn(CONFIG.num_experts, generator=generator),
        experts=LocalExperts(
            {expert: random_mlp(generator) for expert in range(CONFIG.num_experts)}
        ),
        shared_expert=random_mlp(generator),
    )


def rows(count: int) -> torch.Tensor:
    return torch.randn((count, WIDTH), generator=torch.Generator().manual_seed(9))


class Ranks(RankGroup):
    """One of `size` ranks; what the others send is played back, and what it sends is checked."""

    def __init__(self, rank: int, size: int, gathered: list[torch.Tensor] | None = None) -> None:
        super().__init__(rank, size)
        self.gathered = list(gathered or [])
        self.summed: list[torch.Tensor] = []

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        everyone = self.gathered.pop(0)
        assert torch.equal(tensor, everyone.chunk(self.size)[self.rank])
        return everyone

    def sum_to_owner(self, tensor: torch.Tensor) -> torch.Tensor:
        self.summed.append(tensor.clone())
        return tensor.chunk(self.size)[self.rank]

    def sum_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        self.summed.append(tensor.clone())
        return tensor


def of_rank(weights: MoeWeights, group: RankGroup) -> MoeWeights:
    own = expert_range(CONFIG.num_experts, group)
    return replace(
        weights, experts=LocalExperts({expert: weights.experts.by_id[expert] for expert in own})
    )


def test_the_bias_chooses_but_does_not_weigh() -> None:
    """Gates are the chosen experts' plain scores, normed to 1, times the scaling factor."""
    weights = replace(random_weights(), correction_bias=torch.tensor([9.0, 0, 0, 9.0, 0, 0]))
    hidden = rows(5)

    choice, gates = route(weights, CONFIG, hidden)

    assert choice.sort(1).values.tolist() == [[0, 3]] * 5
    scores = torch.sigmoid(hidden @ weights.router.weight.T).gather(1, choice)
    torch.testing.assert_close(gates, scores / scores.sum(1, keepdim=True) * 2.5)


def test_routing_is_computed_in_fp32() -> None:
    """bf16 rows choose as the same values in fp32 do."""
    hidden = rows(50).bfloat16()

    choice, gates = route(random_weights(), CONFIG, hidden)
    expected, _ = route(random_weights(), CONFIG, hidden.float())

    assert torch.equal(choice, expected)
    assert gates.dtype == torch.float32


def test_one_rank_computes_the_definition() -> None:
    """Row by row: the chosen experts, weighed, and the shared one."""
    weights, hidden = random_weights(), rows(9)
    choice, gates = route(weights, CONFIG, hidden)

    out = moe(weights, CONFIG, hidden, num_replicated=9, padded_len=0, group=RankGroup())

    for row in range(9):
        alone = hidden[row : row + 1]
        expected = mlp(weights.shared_expert, alone)
        for expert, gate in zip(choice[row].tolist(), gates[row], strict=True):
            expected = expected + gate * mlp(weights.experts.by_id[expert], alone)
        torch.testing.assert_close(out[row : row + 1], expected, atol=1e-4, rtol=1e-4)


@given(num_experts=st.integers(1, 300), size=st.integers(1, 16))
def test_each_expert_is_on_exactly_one_rank(num_experts: int, size: int) -> None:
    """In order, and no rank holds two more than another."""
    ranges = [expert_range(num_experts, RankGroup(rank, size)) for rank in range(size)]

    assert [expert for r in ranges for expert in r] == list(range(num_experts))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(num_tokens=st.integers(1, 12), size=st.integers(2, 6))
@settings(deadline=None, max_examples=25)
def test_replicated_rows_get_each_contribution_from_one_rank(num_tokens: int, size: int) -> None:
    """Rows that every rank has are counted once: the ranks' parts are disjoint and complete."""
    weights, hidden = random_weights(), rows(num_tokens)
    groups = [Ranks(rank, size) for rank in range(size)]

    for group in groups:
        moe(of_rank(weights, group), CONFIG, hidden, num_tokens, 0, group)

    parts = torch.stack([group.summed[0] for group in groups])  # [size, n, k, width]
    assert torch.all(parts.abs().amax(-1).gt(0).sum(0) == 1)
    choice, gates = route(weights, CONFIG, hidden)
    assert choice.shape == parts.shape[1:3]
    routed = (parts.sum(0) * gates.unsqueeze(-1)).sum(1)
    whole = moe(weights, CONFIG, hidden, num_tokens, 0, RankGroup())
    out = routed + mlp(weights.shared_expert, hidden)
    torch.testing.assert_close(out, whole, atol=1e-4, rtol=1e-4)


def test_own_rows_are_computed_where_their_experts_are() -> None:
    """Two ranks with 3 and 1 own rows and one replicated row; padding is routed nowhere."""
    weights, size, padded_len = random_weights(), 2, 3
    common, own = rows(5)[:1], [rows(5)[1:4], rows(5)[4:]]
    sent, choices = [], []
    for share in own:
        padded = torch.zeros((padded_len, WIDTH))
        padded[: len(share)] = share
        choice = torch.full((padded_len, 2), -1)
        choice[: len(share)] = route(weights, CONFIG, share)[0]
        sent.append(padded)
        choices.append(choice)
    gathered = [torch.cat(sent), torch.cat(choices)]
    groups = [Ranks(rank, size, gathered) for rank in range(size)]

    for group, share in zip(groups, own, strict=True):
        moe(of_rank(weights, group), CONFIG, torch.cat((common, share)), 1, padded_len, group)

    contributions = sum(group.summed[1] for group in groups)  # [size * padded, k, width]
    padding = torch.cat(choices)[:, 0] < 0
    assert int(padding.sum()) == 2
    assert torch.all(contributions[padding] == 0)
    for rank, share in enumerate(own):
        gates = route(weights, CONFIG, share)[1]
        mine = contributions[rank * padded_len : rank * padded_len + len(share)]
        out = (mine * gates.unsqueeze(-1)).sum(1) + mlp(weights.shared_expert, share)
        expected = moe(weights, CONFIG, share, len(share), 0, RankGroup())
        # The number of rows in a product moves its rounding; values are of the order of 10.
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
