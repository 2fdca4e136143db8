"""Decode's index scores over pages: any page order, ragged lengths, several tokens a request."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.paged_indexer import paged_indexer
from shared.engine.kernels.reference import indexing as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 32
TOLERANCE = 1e-3  # of a row's largest score: see test_indexer_logits


@dataclass(frozen=True)
class Call:
    """What one call scores with."""

    query: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor
    limits: torch.Tensor

    def run(self, num_columns: int) -> torch.Tensor:
        logits = self._untouched(num_columns)
        paged_indexer(self.query, self.weights, self.pages, self.page_table, self.limits, logits)
        return logits

    def meaning(self, num_columns: int) -> torch.Tensor:
        logits = self._untouched(num_columns)
        reference.paged_indexer(
            self.query, self.weights, self.pages, self.page_table, self.limits, logits
        )
        return logits

    def only(self, requests: slice, tokens: slice) -> "Call":
        return Call(
            self.query[requests, tokens].contiguous(),
            self.weights[requests, tokens].contiguous(),
            self.pages,
            self.page_table[requests],
            self.limits[requests, tokens].contiguous(),
        )

    def _untouched(self, num_columns: int) -> torch.Tensor:
        shape = (*self.limits.shape, num_columns)
        return torch.full(shape, torch.nan, device=self.pages.device)


def index_pages(num_pages: int, generator: torch.Generator) -> torch.Tensor:
    keys = torch.randn((num_pages, 64 * 128), generator=generator, device=DEVICE)
    exponents = torch.randint(-3, 3, (num_pages, 64), generator=generator, device=DEVICE)
    parts = (keys.to(torch.float8_e4m3fn), torch.exp2(exponents.float()))
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def make_call(limits: list[list[int]], num_pages: int = 12, heads: int = HEADS) -> Call:
    """Every request's pages are drawn at random; requests may share them."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    num_requests, num_tokens = len(limits), len(limits[0])
    width = -(-max(map(max, limits)) // 64)
    shape = (num_requests, num_tokens, heads)
    table = torch.randint(num_pages, (num_requests, width), generator=generator, device=DEVICE)
    return Call(
        torch.randn((*shape, 128), generator=generator, device=DEVICE).to(torch.float8_e4m3fn),
        torch.randn(shape, generator=generator, device=DEVICE),
        index_pages(num_pages, generator),
        table.int(),
        torch.tensor(limits, dtype=torch.int32, device=DEVICE),
    )


def assert_as_meant(call: Call, num_columns: int) -> None:
    scores, expected = call.run(num_columns), call.meaning(num_columns)

    assert torch.equal(scores.isnan(), expected.isnan())
    scores, expected = scores.nan_to_num(), expected.nan_to_num()
    largest = expected.abs().amax(-1, keepdim=True)
    assert bool(((scores - expected).abs() <= TOLERANCE * largest).all())


CASES = [
    pytest.param([[64]], id="one-page"),
    pytest.param([[1]], id="one-key"),
    pytest.param([[200], [3], [129]], id="ragged-lengths"),
    pytest.param([[130, 131]], id="a-draft-token"),
    pytest.param([[126, 127, 128], [63, 64, 65]], id="three-tokens-over-a-page-s-end"),
    pytest.param([[190, 191, 192, 193], [4, 5, 6, 7]], id="four-tokens"),
    pytest.param([[70, 71], [70, 0], [0, 0]], id="padded-tokens-and-requests"),
]


@pytest.mark.parametrize("limits", CASES)
def test_each_query_scores_the_keys_below_its_limit(limits: list[list[int]]) -> None:
    assert_as_meant(make_call(limits), 256)


@given(
    num_tokens=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    drop=st.integers(0, 3),
)
@settings(deadline=None, max_examples=25)
def test_any_lengths_can_stand_in_one_batch(num_tokens: int, lengths: list[int], drop: int) -> None:
    limits = [[max(0, length - drop * token) for token in range(num_tokens)] for length in lengths]
    limits[0][0] = max(1, limits[0][0])

    assert_as_meant(make_call(limits), 200)


def test_sixteen_heads_are_scored_too() -> None:
    assert_as_meant(make_call([[70, 71]], heads=16), 80)


def test_a_query_s_bits_do_not_depend_on_the_batch() -> None:
    """Alone, beside another request, and beside other tokens of its own request."""
    call = make_call([[150, 151, 152, 153], [90, 91, 92, 93]])

    together = call.run(192)

    for request in range(2):
        for token in range(4):
            alone = call.only(slice(request, request + 1), slice(token, token + 1)).run(192)
            torch.testing.assert_close(
                together[request, token], alone[0, 0], rtol=0, atol=0, equal_nan=True
            )


def test_pages_may_be_one_layer_of_a_block_s_pages() -> None:
    """A pool that keeps a block's layers side by side hands out pages that are further apart."""
    call = make_call([[100, 101], [30, 31]])
    pool = torch.zeros(len(call.pages), 3, 8448, dtype=torch.uint8, device=DEVICE)
    pool[:, 1] = call.pages

    assert_as_meant(replace(call, pages=pool[:, 1]), 128)


def test_columns_that_are_not_there_are_not_written() -> None:
    call = make_call([[100], [100]])

    scores = call.run(70)

    assert torch.equal(scores, call.run(128)[..., :70])


def test_no_requests_are_no_work() -> None:
    call = make_call([[1]]).only(slice(0, 0), slice(0, 1))

    assert call.run(64).shape == (0, 1, 64)


BAD_CALLS = [
    pytest.param("query", torch.zeros(1, 2, HEADS, 128), "e4m3", id="query-in-fp32"),
    pytest.param(
        "query",
        torch.zeros(1, 5, HEADS, 128, dtype=torch.float8_e4m3fn),
        "5 query tokens",
        id="five-tokens",
    ),
    pytest.param("weights", torch.zeros(1, 2, 16), "weights", id="weights-of-other-heads"),
    pytest.param("pages", torch.zeros(3, 8320, dtype=torch.uint8), "pages", id="short-pages"),
    pytest.param("page_table", torch.zeros(2, 1, dtype=torch.int32), "table", id="other-requests"),
    pytest.param("limits", torch.zeros(1, 2, dtype=torch.int64), "limits", id="limits-in-64-bits"),
    pytest.param("logits", torch.zeros(2, 64), "logits", id="logits-without-tokens"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_CALLS)
def test_unsuitable_input_is_refused(name: str, value: torch.Tensor, words: str) -> None:
    arguments = {
        "query": torch.zeros(1, 2, HEADS, 128, dtype=torch.float8_e4m3fn),
        "weights": torch.zeros(1, 2, HEADS),
        "pages": torch.zeros(3, 8448, dtype=torch.uint8),
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "limits": torch.zeros(1, 2, dtype=torch.int32),
        "logits": torch.zeros(1, 2, 64),
    }

    with pytest.raises(ValueError, match=words):
        paged_indexer(**(arguments | {name: value}))


@pytest.mark.gpu
def test_pools_and_rows_past_two_to_the_31_elements_are_reached() -> None:
    """Pages behind 2**31 bytes, and logits rows behind 2**31 elements."""
    num_pages, num_columns = 300_000, 1 << 20
    generator = torch.Generator(DEVICE).manual_seed(0)
    pages = torch.zeros((num_pages, 8448), dtype=torch.uint8, device=DEVICE)
    pages[-16:] = index_pages(16, generator)
    small = make_call([[1000, 1001]] * 1025)
    table = torch.randint(num_pages - 16, num_pages, (1025, 16), generator=generator, device=DEVICE)
    call = replace(small, pages=pages, page_table=table.int())

    scores = call.run(num_columns)[-1:, :, :1024]

    expected = call.only(slice(1024, 1025), slice(0, 2)).meaning(1024)
    assert torch.equal(scores.isnan(), expected.isnan())
    error = (scores - expected).nan_to_num().abs().max()
    assert error <= TOLERANCE * expected.nan_to_num().abs().max()
