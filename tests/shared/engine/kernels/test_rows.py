"""What the row kernels have in common: pages of rows, and that all of them compile for Hopper."""

import pytest
import torch

from shared.engine.kernels.rows import check_row_pages, check_slots
from tests.shared.engine.kernels.offline import Build, compile_for_hopper

PAGES = {"codes": "*u8", "scales": "*fp32", "ropes": "*bf16", "page_bytes": "i32"}
INT = "*i32"


def build(name: str, signature: dict[str, str], num_warps: int = 4, **constants: int) -> Build:
    """A kernel of the module of the same name, as its wrapper launches it."""
    module = name.removeprefix("_").replace("_list", "_rows").replace("_range", "_rows")
    strides = tuple(argument for argument in signature if argument.endswith(("stride", "bytes")))
    kernel = f"shared.engine.kernels.{module}:{name}"
    return Build(kernel, signature, constants, {"num_warps": num_warps}, strides)


def test_all_row_kernels_compile_for_hopper_without_spills() -> None:
    """At one query row of 2,048 positions; four of them may spill in the resolver."""
    latent = {"latent": "*bf16", "latent_stride": "i32", "slots": "*i64"}
    keys = {"keys": "*bf16", "key_stride": "i32", "slots": "*i64"}
    out = {"out": "*bf16", "num_rows": "i32"}
    plan = {"plan_host_rows": INT, "plan_device_rows": INT}
    places = {"positions": INT, "page_table": INT, "page_table_stride": "i32", "leases": INT}
    tables = {"first_rows": "*i64", "pages": INT, "keys": INT, "order": "*i16", "row_ids": INT}
    written = {"num_misses": INT, "counts": INT, "scratch": INT, "scratch_stride": "i64"}
    pools = {"host": "*i64", "device": "*i64"}
    counts = {"plan_stride": "i32", "num_misses": INT, "num_requests": "i32"}
    builds = [
        build("_insert_rows", {**latent, **PAGES, "num_rows": "i32"}, 2, TILE_ROWS=8),
        build("_insert_keys", {**keys, **PAGES, "num_keys": "i32"}, TILE_KEYS=32),
        build("_dequantise_list", {**PAGES, "row_ids": INT, **out}, TILE_ROWS=8),
        build("_dequantise_range", {**PAGES, "first_row": "i32", **out}, TILE_ROWS=8),
        build(
            "_resolve_rows",
            {**places, **tables, **plan, **written},
            num_warps=8,
            NUM_SELECTED=2048,
            SELECTED=2048,
            HOT_ROWS=4096,
            HOT=4096,
        ),
        build(
            "_host_gather",
            {**pools, **plan, **counts},
            num_warps=32,
            REQUESTS=64,
            TILE_ROWS=99,
            TILE=8192,
        ),
    ]

    compiled = compile_for_hopper(builds)

    assert [kernel.spilled_bytes for kernel in compiled] == [0] * len(builds)


def test_pages_of_one_layer_may_be_a_strided_view() -> None:
    """Block-major pools keep a block's layers side by side."""
    check_row_pages(torch.zeros(3, 2, 64, 656, dtype=torch.uint8)[:, 1])


@pytest.mark.parametrize(
    ("pages", "complaint"),
    [
        pytest.param(torch.zeros(2, 64, 656), "bytes", id="dtype"),
        pytest.param(torch.zeros(2, 32, 656, dtype=torch.uint8), "64, 656", id="page-size"),
        pytest.param(
            torch.zeros(2, 64, 672, dtype=torch.uint8)[..., :656], "contiguous", id="padded-rows"
        ),
    ],
)
def test_other_pages_are_refused(pages: torch.Tensor, complaint: str) -> None:
    """The kernels know one row layout."""
    with pytest.raises(ValueError, match=complaint):
        check_row_pages(pages)


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(torch.zeros(3).int(), id="dtype"),
        pytest.param(torch.zeros(2).long(), id="too-few"),
        pytest.param(torch.zeros(6).long()[::2], id="strided"),
    ],
)
def test_other_slots_are_refused(slots: torch.Tensor) -> None:
    """One slot a row."""
    with pytest.raises(ValueError, match="3 contiguous int64"):
        check_slots(slots, 3)
