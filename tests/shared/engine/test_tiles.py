"""Tiles shared out over threads: all done, once, with the same bits, whoever did them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from shared.engine.attention import select_positions, sparse_attention
from shared.engine.tiles import by_rows, spread
from tests import demo


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with demo.threads(request.param):
        yield request.param


@pytest.mark.parametrize("num_tiles", [0, 1, 2, 7])
def test_every_tile_is_worked_on_once(threads: int, num_tiles: int) -> None:
    done: list[int] = []

    spread(done.extend, range(num_tiles))

    assert sorted(done) == list(range(num_tiles))


@pytest.mark.usefixtures("threads")
def test_an_error_in_a_part_is_raised() -> None:
    def fail(part: Sequence[int]) -> None:
        if 3 in part:
            raise ValueError("tile 3")

    with pytest.raises(ValueError, match="tile 3"):
        spread(fail, range(8))


def test_parts_work_in_the_caller_s_inference_mode(threads: int) -> None:
    """Its tensors may not be written outside of it."""

    def fill(out: torch.Tensor, part: Sequence[int]) -> None:
        for tile in part:
            out[tile] = 1.0

    with torch.inference_mode():
        out = torch.zeros(8)
        spread(lambda part: fill(out, part), range(8))

    assert out.tolist() == [1.0] * 8


@dataclass(frozen=True)
class Pair:
    double: torch.Tensor
    missing: torch.Tensor | None


@pytest.mark.parametrize("num_rows", [0, 1, 15, 32, 601])
def test_rows_are_computed_in_parts_and_come_back_in_order(threads: int, num_rows: int) -> None:
    """Tensors, None, tuples and dataclasses of them; few rows are not worth a second thread."""
    begins: list[int] = []

    def compute(rows: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor, Pair]:
        begins.append(int(rows[0]) if len(rows) else 0)
        return rows + more, Pair(2 * rows, None)

    rows = torch.arange(num_rows)
    added, pair = by_rows(compute, rows, rows)

    assert torch.equal(added, 2 * rows)
    assert torch.equal(pair.double, 2 * rows)
    assert pair.missing is None
    assert len(begins) == max(1, min(threads, num_rows // 16))


def test_torch_itself_computes_with_one_thread_in_every_part(threads: int) -> None:
    """An operation that torch splits has other bits where it is cut (601 rows and 3 threads)."""
    numbers: list[int] = []

    spread(lambda part: numbers.append(torch.get_num_threads()), range(threads))

    assert numbers == [1] * threads


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
    with demo.threads(1):
        alone_chosen, alone_out = run()

    assert torch.equal(chosen, alone_chosen)
    assert torch.equal(out, alone_out)
