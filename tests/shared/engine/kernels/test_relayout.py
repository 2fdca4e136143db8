"""Interleaved shards become token order, and token order shards: nothing is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.reference import kv_rows as reference
from shared.engine.kernels.relayout import to_shards, to_token_order
from shared.engine.kv.layout import Sharding

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Whole rows, key records, and the two fields of an index page.
WIDTHS = st.sampled_from([656, 132, 128, 4])
SHARDINGS = st.sampled_from([Sharding(1, 64), Sharding(2, 1), Sharding(3, 64), Sharding(8, 1)])


def noise(*shape: int) -> torch.Tensor:
    """Bytes that no kernel would write by chance."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@settings(max_examples=15, deadline=None)
@given(width=WIDTHS, sharding=SHARDINGS, num_tokens=st.integers(0, 192))
def test_tokens_come_out_in_order_and_other_rows_keep_their_bytes(
    width: int, sharding: Sharding, num_tokens: int
) -> None:
    """Any number of tokens, so the last page and the last segment are ragged."""
    shards, target = noise(sharding.size, 3, 64, width), noise(3, 64, width)
    expected = target.clone()
    reference.to_token_order(shards, sharding, num_tokens, expected)

    out = target.to(DEVICE, copy=True)
    to_token_order(shards.to(DEVICE), sharding, num_tokens, out)

    assert torch.equal(out.cpu(), expected)


@settings(max_examples=15, deadline=None)
@given(width=WIDTHS, sharding=SHARDINGS, num_tokens=st.integers(0, 192))
def test_the_way_back_restores_every_shard(width: int, sharding: Sharding, num_tokens: int) -> None:
    """There and back, the rows of all tokens are where they were; the others keep their bytes."""
    shards, target = noise(sharding.size, 3, 64, width), noise(sharding.size, 3, 64, width)
    tokens = noise(3, 64, width).to(DEVICE)
    to_token_order(shards.to(DEVICE), sharding, num_tokens, tokens)
    expected = target.clone()
    reference.to_shards(tokens.cpu(), sharding, num_tokens, expected)

    back = target.to(DEVICE, copy=True)
    to_shards(tokens, sharding, num_tokens, back)

    assert torch.equal(back.cpu(), expected)
    for rank in range(sharding.size):
        kept = sharding.num_local(num_tokens, rank)
        assert torch.equal(back[rank].flatten(0, 1)[:kept].cpu(), shards[rank].flatten(0, 1)[:kept])


def test_the_fields_of_index_pages_are_moved_as_views() -> None:
    """An index page is 64 keys of 128 bytes, then 64 scales of 4 bytes."""
    sharding, pages = Sharding(2, 1), noise(2, 2, 8448).to(DEVICE)
    out = torch.zeros(4, 8448, dtype=torch.uint8, device=DEVICE)
    places = torch.arange(256)

    for field, width in ((slice(0, 8192), 128), (slice(8192, 8448), 4)):
        to_token_order(
            pages[..., field].unflatten(-1, (64, width)),
            sharding,
            256,
            out[:, field].unflatten(-1, (64, width)),
        )

    page, offset = places // 64, places % 64
    row = places // 2
    keys = pages[..., :8192].unflatten(-1, (64, 128))[places % 2, row // 64, row % 64]
    scales = pages[..., 8192:].unflatten(-1, (64, 4))[places % 2, row // 64, row % 64]
    assert torch.equal(out[:, :8192].unflatten(-1, (64, 128))[page, offset], keys)
    assert torch.equal(out[:, 8192:].unflatten(-1, (64, 4))[page, offset], scales)


@pytest.mark.parametrize(
    ("shards", "num_tokens", "out", "complaint"),
    [
        pytest.param(noise(2, 1, 64, 16), 129, noise(3, 64, 16), "no 65 rows", id="small-shards"),
        pytest.param(noise(2, 1, 64, 16), 128, noise(1, 64, 16), "no 128 tokens", id="small-out"),
        pytest.param(noise(3, 1, 64, 16), 64, noise(1, 64, 16), r"\[2, pages", id="ranks"),
        pytest.param(noise(2, 1, 64, 16), 64, noise(1, 64, 32), "equally many", id="widths"),
        pytest.param(noise(2, 1, 64, 6), 64, noise(1, 64, 6), "4 bytes", id="odd-rows"),
    ],
)
def test_what_does_not_fit_is_refused(
    shards: torch.Tensor, num_tokens: int, out: torch.Tensor, complaint: str
) -> None:
    """With words that say what is wrong."""
    with pytest.raises(ValueError, match=complaint):
        to_token_order(shards, Sharding(2, 1), num_tokens, out)


@pytest.mark.gpu
def test_words_past_two_to_the_31_are_moved() -> None:
    """Key records are moved four bytes at a time, so 65 million of them pass 2**31 words."""
    num_pages = 2**31 // (33 * 64) + 65
    sharding = Sharding(2, 1)
    shards = torch.zeros(2, num_pages // 2, 64, 132, dtype=torch.uint8, device=DEVICE)
    shards[:, -1] = noise(2, 64, 132).to(DEVICE)
    num_tokens = num_pages // 2 * 128
    out = torch.zeros(num_tokens // 64, 64, 132, dtype=torch.uint8, device=DEVICE)

    to_token_order(shards, sharding, num_tokens, out)

    last = shards[:, -1].transpose(0, 1).reshape(2, 64, 132)
    assert torch.equal(out[-2:], last)
