"""The meaning of decode's kernels against what the engine computes on a CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.attention import attend_gathered
from shared.engine.kernels.reference import sparse_decode as reference
from shared.engine.kv.format import Fp8Format
from tests.released import ATTENTION

SCALE = 1 / 16
FORMAT = Fp8Format(ATTENTION)


def stored_rows(seed: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return FORMAT.encode_rows(torch.randn(num_rows, 576, generator=generator))


def queries(seed: int, num_queries: int, num_heads: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_queries, num_heads, 576, generator=generator).bfloat16()


def row_ids(seed: int, num_queries: int, top_k: int, num_rows: int) -> torch.Tensor:
    """Some of them -1, anywhere."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-3, num_rows, (num_queries, top_k), generator=generator).clamp_min(-1).int()
    )


def test_rows_decode_as_the_format_decodes_them() -> None:
    rows = stored_rows(0, 20)

    assert torch.equal(reference.decode_rows(rows), FORMAT.decode_rows(rows))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**30), top_k=st.integers(1, 24), num_hot_rows=st.integers(0, 12))
def test_it_attends_as_the_engine_does(seed: int, top_k: int, num_hot_rows: int) -> None:
    rows, query = stored_rows(seed, 12 + num_hot_rows), queries(seed, 3)
    ids = row_ids(seed, 3, top_k, len(rows))

    out, _ = reference.sparse_mla_decode(query, rows[:12], ids, SCALE, rows[12:])

    gathered = FORMAT.decode_rows(rows[ids.clamp_min(0).long()])
    expected = attend_gathered(query.float(), gathered, ids >= 0, 512, SCALE)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_logarithm_is_that_of_the_softmax_denominator() -> None:
    rows, query = stored_rows(0, 9), queries(1, 1)
    ids = torch.tensor([[3, -1, 8, 3]])

    _, lse = reference.sparse_mla_decode(query, rows, ids, SCALE)

    scores = query[0].float() @ FORMAT.decode_rows(rows[[3, 8, 3]]).T * SCALE
    torch.testing.assert_close(lse[0], scores.exp().sum(-1).log())


def test_a_query_without_rows_is_zero() -> None:
    ids = torch.full((1, 5), -1)

    out, lse = reference.sparse_mla_decode(queries(0, 1), stored_rows(0, 4), ids, SCALE)

    assert torch.equal(out, torch.zeros(1, 4, 512))
    assert torch.equal(lse, torch.full((1, 4), -torch.inf))


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_splits_of_the_places_combine_to_the_whole(num_splits: int) -> None:
    rows, query, ids = stored_rows(0, 40), queries(1, 3), row_ids(2, 3, 20, 40)
    ids[1, 8:12] = -1  # a split of its own when there are five
    whole, whole_lse = reference.sparse_mla_decode(query, rows, ids, SCALE)

    parts = [
        reference.sparse_mla_decode(query, rows, part, SCALE) for part in ids.chunk(num_splits, 1)
    ]
    outputs, lses = (torch.stack(tensors, 1) for tensors in zip(*parts, strict=True))
    out, lse = reference.combine_splits(outputs, lses)

    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse)
