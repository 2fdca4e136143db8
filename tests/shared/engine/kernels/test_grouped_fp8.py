"""Products with block-FP8 matrices are those of the dequantised values."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.experimental.gluon import language as gl

from shared.engine.kernels.grouped_fp8 import grouped_fp8
from shared.engine.kernels.reference import fp8_products as reference
from shared.engine.kernels.split_rows import SplitRows, split_rows
from tests.shared.engine.kernels.offline import MAX_SHARED_BYTES, Build, compile_for_hopper
from tests.shared.engine.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """What is not written must not count."""
    with pytest.MonkeyPatch.context() as patch:
        poison_new_memory(patch)
        yield


def matrices(groups: int, height: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every finite e4m3 code, and scales of which no two are alike."""
    codes = torch.randint(0, 256, (groups, height, inner), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0
    scales = torch.rand(groups, height // 128, inner // 128) * 1e-3 + 1e-4
    return codes.view(torch.float8_e4m3fn), scales


def multiply(
    rows: SplitRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    targets: torch.Tensor | None = None,
) -> torch.Tensor:
    """What out holds after the kernel ran on a copy."""
    made = out.to(DEVICE, copy=True)
    on_device = SplitRows(rows.parts.to(DEVICE), rows.scales.t().contiguous().to(DEVICE).t())
    grouped_fp8(
        on_device,
        weight.to(DEVICE),
        scales.to(DEVICE),
        ends.to(DEVICE),
        made,
        None if targets is None else targets.to(DEVICE),
    )
    return made.float().cpu()


def made_and_expected(
    sizes: list[int],
    num_rows: int,
    width: int,
    inner: int = 384,
    targets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's output and the reference's, NaN where nothing was written."""
    weight, scales = matrices(len(sizes), -(-width // 128) * 128, inner)
    rows = reference.split_rows(torch.randn(num_rows, inner).bfloat16())
    ends = torch.tensor(sizes).cumsum(0).int()
    out = torch.full((num_rows, width), torch.nan, dtype=torch.bfloat16)
    expected = out.clone()
    reference.grouped_fp8(rows, weight, scales, ends, expected, targets)
    return multiply(rows, weight, scales, ends, out, targets), expected.float()


def assert_close(made: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the rounding to bf16, which the interpreter does by cutting off, and the tensor cores'
    sums.
    """
    assert torch.equal(made.isnan(), expected.isnan()), "other rows were written"
    largest = max([0.0, *expected.nan_to_num().abs().flatten().tolist()])
    torch.testing.assert_close(made, expected, rtol=2**-7, atol=1e-3 * largest, equal_nan=True)


@pytest.mark.parametrize(
    ("sizes", "num_rows", "width"),
    [
        pytest.param([0, 0], 0, 128, id="no-rows"),
        pytest.param([0, 0], 5, 128, id="rows-of-no-group"),
        pytest.param([1], 1, 256, id="one-row"),
        pytest.param([3, 0, 17, 1], 30, 256, id="ragged-groups-and-rows-of-none"),
        pytest.param([21], 21, 200, id="a-width-that-is-no-multiple-of-128"),
        pytest.param([40, 0, 70], 120, 128, id="more-rows-than-a-tile"),
    ],
)
def test_each_group_of_rows_has_its_own_matrix(sizes: list[int], num_rows: int, width: int) -> None:
    """And rows of no group stay as they were."""
    assert_close(*made_and_expected(sizes, num_rows, width))


@pytest.mark.parametrize("num_rows", [1, 20])
def test_columns_that_programs_share_are_added(num_rows: int) -> None:
    """A single tile of a matrix with many columns keeps many programs busy."""
    assert_close(*made_and_expected([num_rows], num_rows, 128, inner=2048))


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    inner=st.sampled_from([128, 1152]),
    seed=st.integers(0, 99),
)
def test_products_go_where_they_are_told(sizes: list[int], inner: int, seed: int) -> None:
    """Back to the places that their tokens' choices have."""
    num_rows = sum(sizes) + 3
    targets = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))

    assert_close(*made_and_expected(sizes, num_rows, 128, inner, targets))


def test_ends_beyond_the_rows_mean_all_of_them() -> None:
    """A single matrix needs no count of its own."""
    weight, scales = matrices(1, 128, 128)
    rows, out = reference.split_rows(torch.randn(5, 128)), torch.empty(5, 128).bfloat16()
    expected = out.clone()
    reference.grouped_fp8(rows, weight, scales, torch.tensor([5]).int(), expected)

    made = multiply(rows, weight, scales, torch.tensor([2**31 - 1]).int(), out)

    assert_close(made, expected.float())


@pytest.mark.parametrize(
    ("part", "value", "complaint"),
    [
        pytest.param(0, torch.zeros(2, 2, 128), "parts", id="rows-not-split"),
        pytest.param(1, torch.zeros(2, 1).double(), "scales", id="scales-in-fp64"),
        pytest.param(2, torch.zeros(1, 100, 128).to(torch.float8_e4m3fn), "100", id="half-a-block"),
        pytest.param(3, torch.zeros(1, 1, 2), "weight_scales", id="a-scale-too-many"),
        pytest.param(4, torch.zeros(1).long(), "ends", id="ends-in-64-bits"),
        pytest.param(5, torch.zeros(2, 200).bfloat16(), "128 of them", id="wider-than-the-matrix"),
        pytest.param(6, torch.zeros(3).long(), "2 int64", id="a-target-too-many"),
    ],
)
def test_what_the_kernel_cannot_multiply_is_refused(
    part: int, value: torch.Tensor, complaint: str
) -> None:
    """With words that say what is wrong."""
    arguments: list[torch.Tensor] = [
        torch.zeros(2, 2, 128).to(torch.float8_e4m3fn),
        torch.zeros(2, 1),
        torch.zeros(1, 128, 128).to(torch.float8_e4m3fn),
        torch.zeros(1, 1, 1),
        torch.zeros(1).int(),
        torch.zeros(2, 128).bfloat16(),
        torch.zeros(2).long(),
    ]
    arguments[part] = value

    with pytest.raises(ValueError, match=complaint):
        grouped_fp8(SplitRows(*arguments[:2]), *arguments[2:])


@pytest.mark.parametrize(("rows", "stages", "programs"), [(16, 4, 3), (64, 3, 2)])
def test_tiles_of_few_rows_compile_and_several_fit_a_processor(
    rows: int, stages: int, programs: int
) -> None:
    """One loads while another multiplies or stores."""
    signature = {
        "rows": f"tensordesc<fp8e4nv[{rows}, 128]>",
        "row_scales": "*fp32",
        "weight": "tensordesc<fp8e4nv[128, 128]>",
        "weight_scales": "*fp32",
        "ends": "*i32",
        "num_rows": "i32",
        "sums": "*bf16",
        "split_stride": "i32",
        "sum_stride": "i32",
        "targets": "*i64",
        "groups": "i32",
        "width": "i32",
        "height": "i32",
        "num_blocks": "i32",
        "blocks_a_program": "i32",
        "num_columns": "i32",
    }
    kernel = "shared.engine.kernels.grouped_fp8:_multiply"
    builds = [
        Build(
            kernel,
            signature,
            {"ROWS": rows, "COLUMNS": 128, "STAGES": stages, **special},
            {"num_warps": 4},
            ["sum_stride", "height"],
        )
        for special in ({"GROUPS": 16}, {"GROUPS": 1, "targets": None})
    ]

    for compiled in compile_for_hopper(builds):
        assert not compiled.spilled_bytes and programs * 128 * compiled.registers <= 65536
        assert programs * (compiled.shared_bytes + 1024) <= MAX_SHARED_BYTES + 1024


@pytest.mark.parametrize("is_listed", [False, True])
def test_tiles_of_many_rows_compile_without_spills(is_listed: bool) -> None:
    layout = repr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
    signature = {
        "rows": f"tensordesc<fp8e4nv[64, 128],{layout}>",
        "row_scales": "*fp32",
        "weight": f"tensordesc<fp8e4nv[128, 128],{layout}>",
        "weight_scales": "*fp32",
        "ends": "*i32",
        "num_rows": "i32",
        "out": "*bf16",
        "out_stride": "i32",
        "targets": "*i64",
        "width": "i32",
        "num_blocks": "i32",
        "num_columns": "i32",
    }
    constants = {"STAGES": 4} | ({} if is_listed else {"targets": None})
    kernel = "shared.engine.kernels.grouped_fp8_hopper:_multiply"
    options = {"num_warps": 4, "maxnreg": 168}
    build = Build(kernel, signature, constants, options, ["out_stride", "width"])

    (compiled,) = compile_for_hopper([build])

    assert not compiled.spilled_bytes and compiled.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "num_rows", "width"),
    [
        pytest.param([300], 300, 256, id="one-matrix"),
        pytest.param([901], 1400, 384, id="rows-of-no-group"),
        pytest.param([300, 0, 64, 700, 1], 1400, 384, id="many-rows-of-many-matrices"),
        pytest.param([513], 513, 200, id="a-width-that-is-no-multiple-of-128"),
        pytest.param([0], 300, 128, id="no-rows-of-many"),
        pytest.param([5000], 5000, 2560, id="more-tiles-than-processors"),
    ],
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_many_rows_are_multiplied_as_few_are(
    sizes: list[int], num_rows: int, width: int, is_listed: bool
) -> None:
    """The other kernel has the same meaning."""
    targets = torch.randperm(num_rows) if is_listed else None

    assert_close(*made_and_expected(sizes, num_rows, width, 512, targets))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 30, 200, 1000])
def test_a_rows_bits_do_not_depend_on_its_neighbours(num_rows: int) -> None:
    """Nor on its place."""
    weight, scales = (part.to(DEVICE) for part in matrices(1, 256, 2048))
    ends = torch.tensor([2 * num_rows], dtype=torch.int32, device=DEVICE)

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows), 256)
        grouped_fp8(split_rows(rows), weight, scales, ends, out)
        return out

    rows = torch.randn(2 * num_rows, 2048, device=DEVICE).bfloat16()
    others = torch.cat((rows[num_rows:], torch.randn_like(rows[num_rows:])))
    assert torch.equal(product(rows)[num_rows:], product(others)[:num_rows])


@pytest.mark.gpu
def test_products_past_two_to_the_31_elements_are_written() -> None:
    """Row numbers times widths pass 32 bits in the output."""
    num_rows, width = 2**19 + 8, 4096
    weight, scales = (part.to(DEVICE) for part in matrices(1, width, 128))
    rows = torch.zeros(num_rows, 128, dtype=torch.bfloat16, device=DEVICE)
    rows[-3:] = torch.randn(3, 128, device=DEVICE).bfloat16()
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=DEVICE)
    ends = torch.tensor([num_rows], dtype=torch.int32, device=DEVICE)

    grouped_fp8(split_rows(rows), weight, scales, ends, out)

    expected = torch.empty(3, width)
    last = reference.split_rows(rows[-3:].cpu())
    reference.grouped_fp8(last, weight.cpu(), scales.cpu(), torch.tensor([3]), expected)
    assert_close(out[-3:].float().cpu(), expected)
