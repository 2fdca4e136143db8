"""Index keys are stored in their pages with the bits of the project's own quantiser."""

import pytest
import torch

from shared.engine.kernels.insert_keys import insert_keys
from shared.engine.kernels.reference import kv_rows as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def noise(*shape: int) -> torch.Tensor:
    """Bytes that no kernel would write by chance."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    "num_keys",
    [
        pytest.param(0, id="no-keys"),
        pytest.param(1, id="one-key"),
        pytest.param(64, id="whole-tiles"),
        pytest.param(99, id="a-ragged-tail"),
    ],
)
def test_keys_land_in_their_slots_and_other_slots_keep_their_bytes(num_keys: int) -> None:
    """Values and scales of one page lie apart; some keys have no slot."""
    keys = (torch.randn(num_keys, 128) * torch.logspace(-6, 6, num_keys)[:, None]).bfloat16()
    slots = torch.randperm(4 * 64)[:num_keys]
    slots[1::5] = -1
    pages = noise(4, 8448)
    expected = pages.clone()
    reference.insert_keys(keys, slots, expected)

    written = pages.to(DEVICE, copy=True)
    insert_keys(keys.to(DEVICE), slots.to(DEVICE), written)

    assert torch.equal(written.cpu(), expected)


def test_one_layer_of_a_block_major_pool_is_written_in_place() -> None:
    """Prefill's index pages of a layer are strided, and so may the keys be."""
    pool = noise(3, 2, 8448)
    keys = torch.randn(10, 160).bfloat16()[:, 8:136]
    slots = torch.randperm(3 * 64)[:10]
    expected = pool.clone()
    reference.insert_keys(keys, slots, expected[:, 1])

    written = pool.to(DEVICE, copy=True)
    insert_keys(keys.to(DEVICE), slots.to(DEVICE), written[:, 1])

    assert torch.equal(written.cpu(), expected)


@pytest.mark.parametrize(
    ("keys", "slots", "pages", "complaint"),
    [
        pytest.param(
            torch.zeros(2, 64).bfloat16(), torch.zeros(2).long(), noise(1, 8448), "128", id="width"
        ),
        pytest.param(
            torch.zeros(2, 128).bfloat16(),
            torch.zeros(2).int(),
            noise(1, 8448),
            "int64",
            id="slots",
        ),
        pytest.param(
            torch.zeros(2, 128).bfloat16(), torch.zeros(2).long(), noise(1, 8192), "8448", id="page"
        ),
        pytest.param(
            torch.zeros(2, 128).bfloat16(),
            torch.zeros(2).long(),
            noise(8456)[8:].view(1, 8448),
            "16 bytes",
            id="an-odd-address",
        ),
    ],
)
def test_what_the_kernel_cannot_store_is_refused(
    keys: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, complaint: str
) -> None:
    """With words that say what is wrong."""
    with pytest.raises(ValueError, match=complaint):
        insert_keys(keys, slots, pages)


@pytest.mark.gpu
def test_keys_past_two_to_the_31_elements_land_where_they_should() -> None:
    """Key numbers times strides pass 32 bits among the keys and in the pages."""
    num_keys = 2**24 + 64
    keys = torch.zeros(num_keys, 128, dtype=torch.bfloat16, device=DEVICE)
    keys[-3:] = torch.randn(3, 128, device=DEVICE).bfloat16()
    pages = torch.zeros(num_keys // 64, 8448, dtype=torch.uint8, device=DEVICE)
    expected = torch.zeros(1, 8448, dtype=torch.uint8)
    reference.insert_keys(keys[-64:].cpu(), torch.arange(64), expected)

    insert_keys(keys, torch.arange(num_keys, device=DEVICE), pages)

    assert torch.equal(pages[-1].cpu(), expected[0])
