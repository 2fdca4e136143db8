"""fp8_ds_mla rows become the bf16 values that attention reads, without rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.dequantise_rows import dequantise_range, dequantise_rows
from shared.engine.kernels.reference import kv_rows as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stored_pages(num_pages: int) -> torch.Tensor:
    """Pages of encoded rows of many magnitudes."""
    magnitude = torch.logspace(-8, 8, num_pages * 64)[torch.randperm(num_pages * 64)]
    latent = (torch.randn(num_pages * 64, 576) * magnitude[:, None]).bfloat16()
    return reference.encode_rows(latent).view(num_pages, 64, 656)


def marked(num_rows: int) -> torch.Tensor:
    """An output in which unwritten rows show."""
    return torch.full((num_rows, 576), torch.nan, dtype=torch.bfloat16)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal, NaN marks included."""
    return torch.equal(left.cpu().view(torch.int16), right.cpu().view(torch.int16))


@pytest.mark.parametrize(
    "row_ids",
    [
        pytest.param([], id="no-rows"),
        pytest.param([5], id="one-row"),
        pytest.param([127, 0, 64, 63, 127, 1, 2, 3, 9], id="any-order-with-repeats"),
        pytest.param([-1, 3, -1, -(2**40), 70], id="skipped-rows"),
        pytest.param([-1] * 9, id="all-skipped"),
    ],
)
def test_listed_rows_are_decoded_in_the_lists_order(row_ids: list[int]) -> None:
    """A negative id leaves its row of the output alone."""
    pages, ids, expected = stored_pages(2), torch.tensor(row_ids).long(), marked(len(row_ids))
    reference.dequantise_rows(pages, ids, expected)

    out = marked(len(row_ids)).to(DEVICE)
    dequantise_rows(pages.to(DEVICE), ids.to(DEVICE), out)

    assert same_bits(out, expected)


def test_row_ids_of_32_bits_mean_the_same() -> None:
    """The resolver's row ids are 32-bit."""
    pages, ids = stored_pages(1).to(DEVICE), torch.tensor([7, -1, 60]).to(DEVICE)
    out, narrow = marked(3).to(DEVICE), marked(3).to(DEVICE)
    dequantise_rows(pages, ids, out)

    dequantise_rows(pages, ids.int(), narrow)

    assert same_bits(narrow, out)


@settings(max_examples=5, deadline=None)
@given(first_row=st.integers(0, 191), num_rows=st.integers(0, 192))
def test_a_range_is_the_list_of_its_rows(first_row: int, num_rows: int) -> None:
    """Ranges start and end anywhere."""
    num_rows = min(num_rows, 192 - first_row)
    pages = stored_pages(3)
    expected = marked(num_rows)
    reference.dequantise_rows(pages, torch.arange(first_row, first_row + num_rows), expected)

    out = marked(num_rows).to(DEVICE)
    dequantise_range(pages.to(DEVICE), first_row, out)

    assert same_bits(out, expected)


def test_one_layer_of_a_block_major_pool_can_be_read() -> None:
    """Prefill's pages of a layer are strided."""
    pool = stored_pages(6).view(3, 2, 64, 656)
    ids = torch.tensor([0, 130, 65])
    expected = marked(3)
    reference.dequantise_rows(pool[:, 1], ids, expected)

    out = marked(3).to(DEVICE)
    dequantise_rows(pool.to(DEVICE)[:, 1], ids.to(DEVICE), out)

    assert same_bits(out, expected)


@pytest.mark.parametrize(
    ("num_ids", "dtype", "width", "complaint"),
    [
        pytest.param(3, torch.int64, 576, "2 int32 or int64", id="an-id-too-many"),
        pytest.param(2, torch.int16, 576, "2 int32 or int64", id="narrow-ids"),
        pytest.param(2, torch.int64, 512, "576", id="another-width"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    num_ids: int, dtype: torch.dtype, width: int, complaint: str
) -> None:
    """With words that say what is wrong."""
    ids, out = torch.zeros(num_ids, dtype=dtype), torch.zeros(2, width).bfloat16()

    with pytest.raises(ValueError, match=complaint):
        dequantise_rows(stored_pages(1), ids, out)


def test_a_range_beyond_the_pages_is_refused() -> None:
    """It would read another layer's rows."""
    with pytest.raises(ValueError, match=r"60\.\.70 in 1 pages"):
        dequantise_range(stored_pages(1), 60, marked(10))


@pytest.mark.gpu
@pytest.mark.parametrize("is_listed", [True, False], ids=["list", "range"])
def test_rows_past_two_to_the_31_elements_are_decoded(is_listed: bool) -> None:
    """Row numbers times strides pass 32 bits in the pages and in the output."""
    num_rows = 3_800_000
    pages = torch.zeros(num_rows // 64, 64, 656, dtype=torch.uint8, device=DEVICE)
    pages[-1] = stored_pages(1)[0].to(DEVICE)
    out = torch.zeros(num_rows, 576, dtype=torch.bfloat16, device=DEVICE)
    expected = marked(64)
    reference.dequantise_rows(pages[-1:].cpu(), torch.arange(64), expected)

    if is_listed:
        dequantise_rows(pages, torch.arange(num_rows, device=DEVICE), out)
    else:
        dequantise_range(pages, 0, out)

    assert same_bits(out[-64:], expected)
