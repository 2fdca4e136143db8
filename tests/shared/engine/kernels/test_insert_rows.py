"""Latent rows are stored with the bits of the project's own quantiser."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.insert_rows import insert_rows
from shared.engine.kernels.reference import kv_rows as reference
from shared.engine.kv.format import Fp8Format
from shared.engine.kv.pinned_pool import pinned_pool
from tests.released import ATTENTION

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stored(latent: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The pages after the kernel ran on a copy."""
    pages = pages.to(DEVICE, copy=True)
    insert_rows(latent.to(DEVICE), slots.to(DEVICE), pages)
    return pages.cpu()


def noise(*shape: int) -> torch.Tensor:
    """Bytes that no kernel would write by chance."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    "num_rows",
    [
        pytest.param(0, id="no-rows"),
        pytest.param(1, id="one-row"),
        pytest.param(64, id="whole-tiles"),
        pytest.param(67, id="a-ragged-tail"),
    ],
)
def test_rows_land_in_their_slots_and_other_slots_keep_their_bytes(num_rows: int) -> None:
    """Slots come in any order; some rows have none."""
    latent = torch.randn(num_rows, 576).bfloat16()
    slots = torch.randperm(4 * 64)[:num_rows]
    slots[::5] = -1
    pages = noise(4, 64, 656)
    expected = pages.clone()
    reference.insert_rows(latent, slots, expected)

    written = stored(latent, slots, pages)

    assert torch.equal(written, expected)


@settings(max_examples=15, deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64),
    exponent=st.integers(-30, 30),
)
def test_every_bit_equals_the_formats_own_encoding(bits: list[int], exponent: int) -> None:
    """Any finite values, subnormal ones and signed zeros included, at any scale."""
    values = torch.tensor(bits).to(torch.int16).view(torch.bfloat16).nan_to_num(0, 0, 0)
    scaled = (values.double() * 2.0**exponent).clamp(-1e30, 1e30).bfloat16()
    latent = scaled.repeat(-(-576 // len(bits)) * 2)[: 2 * 576].view(2, 576)

    written = stored(latent, torch.arange(2), noise(1, 64, 656))

    assert torch.equal(written[0, :2], Fp8Format(ATTENTION).encode_rows(latent.float()))


def test_scales_are_right_on_both_sides_of_a_power_of_two() -> None:
    """448 times a power of two still fits its scale; the next value needs twice the scale."""
    amax = torch.tensor([448.0, 450.0, 224.0, 222.0, 0.0, 1e-6])
    latent = (amax[:, None] * torch.ones(576)).bfloat16()

    written = stored(latent, torch.arange(6), noise(1, 64, 656))

    assert torch.equal(written[0, :6], reference.encode_rows(latent))
    scales = written[0, :6, 512:528].contiguous().view(torch.float32)
    assert scales[:4, 0].tolist() == [1.0, 2.0, 0.5, 0.5]


def test_one_layer_of_a_block_major_pool_is_written_in_place() -> None:
    """Prefill's pages of a layer are strided, and so may the latent rows be."""
    pool = noise(3, 2, 64, 656).to(DEVICE)
    before = pool.cpu()
    latent = torch.randn(10, 600).bfloat16()[:, 8:584]
    slots = torch.randperm(3 * 64)[:10]
    expected = before.clone()
    reference.insert_rows(latent, slots, expected[:, 1])

    insert_rows(latent.to(DEVICE), slots.to(DEVICE), pool[:, 1])

    assert torch.equal(pool.cpu(), expected)


@pytest.mark.parametrize(
    ("latent", "slots", "pages", "complaint"),
    [
        pytest.param(
            torch.zeros(2, 576), torch.zeros(2).long(), noise(1, 64, 656), "bf16", id="fp32-latent"
        ),
        pytest.param(
            torch.zeros(2, 576).bfloat16(),
            torch.zeros(3).long(),
            noise(1, 64, 656),
            "2 contiguous int64",
            id="a-slot-too-many",
        ),
        pytest.param(
            torch.zeros(2, 576).bfloat16(),
            torch.zeros(2).long(),
            noise(1, 64, 660),
            "656",
            id="another-row-width",
        ),
        pytest.param(
            torch.zeros(2, 576).bfloat16(),
            torch.zeros(2).long(),
            noise(64 * 656 + 8)[8:].view(1, 64, 656),
            "16 bytes",
            id="an-odd-address",
        ),
    ],
)
def test_what_the_kernel_cannot_store_is_refused(
    latent: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, complaint: str
) -> None:
    """With words that say what is wrong."""
    with pytest.raises(ValueError, match=complaint):
        insert_rows(latent, slots, pages)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_land_where_they_should() -> None:
    """Row numbers times strides pass 32 bits in the latent and in the pages."""
    num_rows = 3_800_000
    assert num_rows * 576 > 2**31 and num_rows * 656 > 2**31
    latent = torch.zeros(num_rows, 576, dtype=torch.bfloat16, device=DEVICE)
    latent[-3:] = torch.randn(3, 576, device=DEVICE).bfloat16()
    pages = torch.zeros(num_rows // 64 + 1, 64, 656, dtype=torch.uint8, device=DEVICE)

    insert_rows(latent, torch.arange(num_rows, device=DEVICE), pages)

    written = pages.flatten(0, 1)[num_rows - 3 : num_rows].cpu()
    assert torch.equal(written, reference.encode_rows(latent[-3:].cpu()))


@pytest.mark.gpu
def test_rows_can_be_written_straight_to_the_host() -> None:
    """The host pool is authoritative: a step's new rows go there too."""
    latent, slots = torch.randn(20, 576).bfloat16(), torch.randperm(128)[:20]
    with pinned_pool(2 * 64 * 656) as pool:
        pages = pool.view(2, 64, 656)
        expected = pages.clone()
        reference.insert_rows(latent, slots, expected)

        insert_rows(latent.to(DEVICE), slots.to(DEVICE), pages)
        torch.cuda.synchronize()

        assert torch.equal(pages, expected)
