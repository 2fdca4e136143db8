"""Activations are split with the bits of their reference, and lose nothing by it."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.reference import fp8_products as reference
from shared.engine.kernels.split_rows import SplitRows, split_gated, split_rows
from tests.shared.engine.kernels.offline import Build, compile_for_hopper
from tests.shared.engine.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """What is not written must not count."""
    with pytest.MonkeyPatch.context() as patch:
        poison_new_memory(patch)
        yield


def activations(num_rows: int, width: int) -> torch.Tensor:
    """Rows of many magnitudes."""
    magnitude = torch.logspace(-6, 6, num_rows)[torch.randperm(num_rows), None]
    return (torch.randn(num_rows, width) * magnitude).bfloat16()


def on_device(*parts: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if part is None else part.to(DEVICE) for part in parts]


def same(made: SplitRows, expected: SplitRows, num_rows: int) -> bool:
    """The first rows' parts and scales, to the bit but for the signs of zeros."""
    ours, theirs = made.parts.cpu().float(), expected.parts.float()
    return torch.equal(ours[:, :num_rows], theirs[:, :num_rows]) and torch.equal(
        made.scales.cpu()[:num_rows], expected.scales[:num_rows]
    )


def whole(split: SplitRows) -> torch.Tensor:
    """What the parts stand for."""
    high, low = split.parts.cpu().float()
    return (high + low) * split.scales.cpu().repeat_interleave(128, 1)


@pytest.mark.parametrize(
    ("num_rows", "width"),
    [
        pytest.param(0, 256, id="no-rows"),
        pytest.param(1, 128, id="one-group"),
        pytest.param(9, 640, id="a-ragged-tail"),
        pytest.param(7, 200, id="a-short-last-group"),
    ],
)
def test_every_row_is_split_by_its_own_scales(num_rows: int, width: int) -> None:
    """What fills the last group up is zero."""
    rows = activations(num_rows, width)

    made = split_rows(rows.to(DEVICE))

    assert same(made, reference.split_rows(rows), num_rows)


@settings(max_examples=15, deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=128),
    exponent=st.integers(-30, 30),
)
def test_any_finite_values_keep_their_bits(bits: list[int], exponent: int) -> None:
    """Subnormal ones and signed zeros included, at any scale."""
    values = torch.tensor(bits).to(torch.int16).view(torch.bfloat16).nan_to_num(0, 0, 0)
    scaled = (values.double() * 2.0**exponent).clamp(-1e30, 1e30).bfloat16()
    rows = scaled.repeat(-(-256 // len(bits)))[:256].view(1, 256)

    made = split_rows(rows.to(DEVICE))

    assert same(made, reference.split_rows(rows), 1)


@given(num_made=st.integers(0, 12), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_rows_are_taken_as_listed_and_only_so_many(num_made: int, seed: int) -> None:
    """One row may be taken often: a token goes to several experts."""
    rows = activations(5, 384)
    sources = torch.randint(0, 5, (12,), generator=torch.Generator().manual_seed(seed))
    count = torch.tensor([num_made], dtype=torch.int32)

    made = split_rows(rows.to(DEVICE), *on_device(sources, count))

    assert made.parts.shape == (2, 12, 384) and made.scales.shape == (12, 3)
    assert same(made, reference.split_rows(rows, sources), num_made)


@settings(max_examples=25, deadline=None)
@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=128))
def test_bf16_rows_are_the_sum_of_their_parts(bits: list[int]) -> None:
    """Exactly, but for values below a five-hundredth of their group's largest."""
    values = torch.tensor(bits).to(torch.int16).view(torch.bfloat16).nan_to_num(0, 0, 0)
    rows = values.clamp(-1e30, 1e30).repeat(128)[:128].view(1, 128)

    made = whole(split_rows(rows.to(DEVICE)))

    largest = max(float(rows.abs().max()), 1e-4)
    is_large = rows.abs() >= largest * 2**-9
    assert torch.equal(made[is_large], rows.float()[is_large])
    assert float((made - rows.float()).abs().max()) <= largest * 2**-17


@pytest.mark.parametrize("num_made", [None, 0, 4])
def test_a_gated_mlps_inner_values_are_split_as_they_are_made(num_made: int | None) -> None:
    """Eight significant bits of the value in fp32."""
    gate_up = torch.randn(6, 2 * 256).mul(3).bfloat16()
    count = None if num_made is None else torch.tensor([num_made], dtype=torch.int32)

    made = whole(split_gated(gate_up.to(DEVICE), *on_device(count)))

    live = 6 if num_made is None else num_made
    gate, up = gate_up.float().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    meant = whole(reference.split_gated(gate_up))
    least = float(expected.abs().max()) * 2**-17
    torch.testing.assert_close(made[:live], expected[:live], rtol=2**-8, atol=least)
    torch.testing.assert_close(meant[:live], expected[:live], rtol=2**-8, atol=least)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_shows(bad: float) -> None:
    """Silently clamped it would become a plausible token."""
    rows = torch.ones(1, 256).bfloat16()
    rows[0, 3] = bad

    values = whole(split_rows(rows.to(DEVICE)))

    assert values[0, :128].isnan().any() and not values[0, 128:].isnan().any()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda: split_rows(torch.ones(2, 128)), "bf16", id="fp32-rows"),
        pytest.param(
            lambda: split_rows(torch.ones(2, 128).bfloat16(), torch.zeros(2).int()),
            "int64",
            id="narrow-sources",
        ),
        pytest.param(
            lambda: split_rows(torch.ones(2, 128).bfloat16(), None, torch.zeros(1)),
            "int32",
            id="a-count-of-another-type",
        ),
        pytest.param(lambda: split_gated(torch.ones(2, 384).bfloat16()), "128", id="half-a-group"),
    ],
)
def test_what_the_kernel_cannot_split_is_refused(call: object, complaint: str) -> None:
    """With words that say what is wrong."""
    with pytest.raises(ValueError, match=complaint):
        call()  # type: ignore[operator]


def test_the_kernels_compile_for_hopper() -> None:
    """Whatever may be absent there and not."""
    shared = {
        "row_stride": "i32",
        "num_rows": "*i32",
        "length": "i32",
        "high_parts": "*u8",
        "low_parts": "*u8",
        "scales": "*fp32",
        "num_groups": "i32",
    }
    rows = {"rows": "*bf16", "sources": "*i64", "width": "i32", **shared}
    gated = {"gate_up": "*bf16", **shared}
    module, options = "shared.engine.kernels.split_rows", {"num_warps": 4}
    builds = []
    for special in ({}, {"num_rows": None}):
        constants = {"TILE_GROUPS": 16, **special}
        builds += [
            Build(f"{module}:_split_rows", rows, constants, options),
            Build(f"{module}:_split_rows", rows, constants | {"sources": None}, options),
            Build(f"{module}:_split_gated", gated, constants, options),
        ]

    assert not any(compiled.spilled_bytes for compiled in compile_for_hopper(builds))


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_split() -> None:
    """Row numbers times widths pass 32 bits in rows and parts."""
    rows = torch.zeros(2**19 + 8, 4096, dtype=torch.bfloat16, device=DEVICE)
    rows[-3:] = torch.randn(3, 4096, device=DEVICE).bfloat16()

    made = split_rows(rows)

    expected = reference.split_rows(rows[-3:].cpu())
    assert same(SplitRows(made.parts[:, -3:], made.scales[-3:]), expected, 3)
