"""Tiles shared out over threads: all done, once, with the same bits, whoever did them."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from shared.engine.attention import select_positions, sparse_attention
from shared.engine.tiles import spread


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_tiles", [0, 1, 2, 7])
def test_every_tile_is_worked_on_once(threads: int, num_tiles: int) -> None:
    done: list[int] = []

    spread(done.extend, range(num_tiles))

    assert sorted(done) == list(range(num_tiles))


def test_an_error_in_a_part_is_raised_and_torch_gets_its_threads_back(threads: int) -> None:
    def fail(part: Sequence[int]) -> None:
        if 3 in part:
            raise ValueError("tile 3")

    with pytest.raises(ValueError, match="tile 3"):
        spread(fail, range(8))

    assert torch.get_num_threads() == threads


def test_parts_work_in_the_caller_s_inference_mode(threads: int) -> None:
    """Its tensors may not be written outside of it."""

    def fill(out: torch.Tensor, part: Sequence[int]) -> None:
        for tile in part:
            out[tile] = 1.0

    with torch.inference_mode():
        out = torch.zeros(8)
        spread(lambda part: fill(out, part), range(8))

    assert out.tolist() == [1.0] * 8


def test_attention_has_the_same_bits_for_every_number_of_threads(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, topk = 400, 64
    query = torch.randn(num_tokens, 4, 32, generator=generator)
    weights = torch.rand(num_tokens, 4, generator=generator)
    keys = torch.randn(num_tokens, 32, generator=generator)
    rows = torch.randn(num_tokens, 48, generator=generator)
    limits = torch.arange(num_tokens)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        chosen = select_positions(query, weights, keys, limits, 0, topk)
        return chosen, sparse_attention(rows.unsqueeze(1), rows, chosen, 40, 0.2)

    chosen, out = run()
    torch.set_num_threads(1)
    alone_chosen, alone_out = run()

    assert torch.equal(chosen, alone_chosen)
    assert torch.equal(out, alone_out)
