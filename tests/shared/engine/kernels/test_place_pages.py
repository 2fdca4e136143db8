"""Interleaved pages of several ranks become a sequence's pages in a pool: nothing is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.place_pages import place_pages
from shared.engine.kernels.reference import kv_rows as reference
from shared.engine.kv.layout import Sharding
from shared.engine.kv.pinned_pool import pinned_pool
from tests.shared.engine.kernels.offline import Build, compile_for_hopper

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS, NUM_LAYERS, NUM_PAGES = 2, 2, 9
# Whole rows, and the two fields of an index page.
WIDTHS = st.sampled_from([656, 128, 4])
SHARDINGS = st.sampled_from(
    [Sharding(1, 64), Sharding(1, 1), Sharding(2, 1), Sharding(3, 64), Sharding(2, 16)]
)


@dataclass(frozen=True)
class Case:
    """Some of a sequence's tokens, and where their pages go."""

    width: int
    sharding: Sharding
    first_page: int
    num_tokens: int
    page_ids: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sharding = draw(SHARDINGS)
    num_held = NUM_BLOCKS * sharding.size
    first_page = draw(st.integers(0, num_held - 1))
    num_tokens = draw(st.integers(0, 64 * (num_held - first_page)))
    order = draw(st.permutations(range(NUM_PAGES)))
    return Case(draw(WIDTHS), sharding, first_page, num_tokens, list(order[: -(-num_tokens // 64)]))


def noise(*shape: int) -> torch.Tensor:
    """Bytes that no kernel would write by chance."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@contextmanager
def pinned(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same in host memory that the device reads and writes."""
    with pinned_pool(tensor.nbytes) as pool:
        copy = pool.view(tensor.shape)
        copy.copy_(tensor)
        yield copy


@settings(max_examples=25, deadline=None)
@given(case=cases(), num_programs=st.sampled_from([1, 5, 40]))
def test_each_token_reaches_its_row_in_all_layers_and_no_other_row_changes(
    case: Case, num_programs: int
) -> None:
    """Pages in any order, a ragged last one, a beginning inside an effective block."""
    shards = noise(case.sharding.size, NUM_BLOCKS, NUM_LAYERS, 64, case.width)
    before = noise(NUM_LAYERS, NUM_PAGES, 64, case.width)
    page_ids = torch.tensor(case.page_ids, dtype=torch.int64)
    place = (case.sharding, case.first_page, case.num_tokens)
    expected = before.clone()
    reference.place_pages(shards, *place, page_ids, expected)

    in_device = before.to(DEVICE, copy=True)
    place_pages(shards.to(DEVICE), *place, page_ids.to(DEVICE), in_device, num_programs)
    with pinned(before) as in_host:
        place_pages(shards.to(DEVICE), *place, page_ids.to(DEVICE), in_host, num_programs)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

        assert torch.equal(in_host, expected)
    assert torch.equal(in_device.cpu(), expected)


def test_the_fields_of_index_pages_are_placed_as_views() -> None:
    """An index page is 64 keys of 128 bytes, then 64 scales of 4 bytes."""
    sharding, shards = Sharding(2, 1), noise(2, 1, 3, 8448).to(DEVICE)
    pages = torch.zeros(3, 4, 8448, dtype=torch.uint8, device=DEVICE)
    page_ids = torch.tensor([3, 0], device=DEVICE)

    for field, width in ((slice(0, 8192), 128), (slice(8192, 8448), 4)):
        place_pages(
            shards[..., field].unflatten(-1, (64, width)),
            sharding,
            0,
            128,
            page_ids,
            pages[..., field].unflatten(-1, (64, width)),
            4,
        )

    for token in (0, 1, 63, 64, 127):
        row, own = token % 64, shards[token % 2, 0]
        page = pages[:, page_ids[token // 64]]
        key, scale = slice(128 * row, 128 * row + 128), slice(8192 + 4 * row, 8196 + 4 * row)
        kept = token // 2
        assert torch.equal(page[:, key], own[:, 128 * kept : 128 * kept + 128])
        assert torch.equal(page[:, scale], own[:, 8192 + 4 * kept : 8196 + 4 * kept])


@pytest.mark.parametrize(
    ("shards", "first_page", "num_tokens", "pages", "complaint"),
    [
        pytest.param((2, 1, 3, 64, 16), 0, 129, (3, 9, 64, 16), "before page 3", id="too-few"),
        pytest.param((2, 1, 3, 64, 16), 1, 65, (3, 9, 64, 16), "before page 3", id="too-late"),
        pytest.param((3, 1, 3, 64, 16), 0, 64, (3, 9, 64, 16), r"\[2, blocks, 3", id="ranks"),
        pytest.param((2, 1, 4, 64, 16), 0, 64, (3, 9, 64, 16), r"\[2, blocks, 3", id="layers"),
        pytest.param((2, 1, 3, 64, 16), 0, 64, (3, 9, 64, 32), "rows of 32", id="widths"),
        pytest.param((2, 1, 3, 64, 6), 0, 64, (3, 9, 64, 6), "4 bytes", id="odd-rows"),
        pytest.param((2, 1, 1, 64, 8200), 0, 64, (1, 2, 64, 8200), "at most 8192", id="wide"),
        pytest.param((2, 1, 3, 64, 16), -1, 64, (3, 9, 64, 16), "page -1", id="before-the-start"),
    ],
)
def test_what_does_not_fit_is_refused(
    shards: tuple[int, ...],
    first_page: int,
    num_tokens: int,
    pages: tuple[int, ...],
    complaint: str,
) -> None:
    """With words that say what is wrong."""
    page_ids = torch.arange(-(-num_tokens // 64))

    with pytest.raises(ValueError, match=complaint):
        place_pages(
            noise(*shards), Sharding(2, 1), first_page, num_tokens, page_ids, noise(*pages), 1
        )


def test_as_many_ids_as_pages_are_needed() -> None:
    """An id too few would be read from behind the list."""
    shards, pages = noise(2, 1, 3, 64, 16), noise(3, 9, 64, 16)

    with pytest.raises(ValueError, match="2 int64"):
        place_pages(shards, Sharding(2, 1), 0, 65, torch.tensor([4]), pages, 1)
    with pytest.raises(ValueError, match="0 programs"):
        place_pages(shards, Sharding(2, 1), 0, 64, torch.tensor([4]), pages, 0)


def test_every_width_compiles_for_hopper() -> None:
    """One kernel a width, whatever the ranks and the interleave, and nothing spilled."""
    integers = {name: "i64" for name in ("rank_stride", "layer_stride")}
    small = ("block_stride", "shard_layer_stride", "page_stride", "first_page", "num_tokens",
             "num_layers", "ranks", "interleave")  # fmt: skip
    builds = [
        Build(
            kernel="shared.engine.kernels.place_pages:_place_pages",
            signature={
                "shards": f"*{word}",
                "pages": f"*{word}",
                "page_ids": "*i64",
                **integers,
                **{name: "i32" for name in small},
            },
            constants={"WORDS": words, "TILE": tile},
            options={"num_warps": num_warps},
        )
        for word, words, tile, num_warps in (
            ("i64", 82, 8192, 32),
            ("i64", 16, 1024, 4),
            ("i32", 1, 64, 1),
        )
    ]

    for compiled in compile_for_hopper(builds):
        assert compiled.spilled_bytes == 0
        assert compiled.shared_bytes == 0


@pytest.mark.gpu
def test_words_past_two_to_the_31_are_placed() -> None:
    """Rows are moved eight bytes at a time, so 26 million of them pass 2**31 words."""
    num_pages = 2**31 // (82 * 64) + 9
    shards = noise(1, 2, 1, 64, 656).to(DEVICE)
    pages = torch.zeros(1, num_pages, 64, 656, dtype=torch.uint8, device=DEVICE)
    page_ids = torch.tensor([num_pages - 1, num_pages - 3], device=DEVICE)

    place_pages(shards, Sharding(1, 64), 0, 128, page_ids, pages, 4)

    assert torch.equal(pages[0, -1], shards[0, 0, 0])
    assert torch.equal(pages[0, -3], shards[0, 1, 0])
    assert not pages[0, -2].any() and not pages[0, 0].any()


@pytest.mark.gpu
def test_shards_past_two_to_the_31_words_are_read() -> None:
    """A lane of staging may be as large; its last block lies beyond 32 bits."""
    num_blocks = 2**31 // (82 * 64) + 9
    shards = torch.zeros(1, num_blocks, 1, 64, 656, dtype=torch.uint8, device=DEVICE)
    shards[0, -1] = noise(1, 64, 656).to(DEVICE)
    pages = torch.zeros(1, 2, 64, 656, dtype=torch.uint8, device=DEVICE)

    place_pages(
        shards, Sharding(1, 64), num_blocks - 1, 64, torch.tensor([1], device=DEVICE), pages, 4
    )

    assert torch.equal(pages[0, 1], shards[0, -1, 0])
