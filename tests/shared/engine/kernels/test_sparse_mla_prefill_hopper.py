"""The 64-head kernel: its compilation everywhere, its turns on a GPU.

What it means is tested through `sparse_mla_prefill`, which calls it on Hopper.
"""

import pytest
import torch

from shared.engine.kernels import sparse_mla_prefill_hopper as kernel
from shared.engine.kernels.reference import sparse_prefill as reference
from shared.engine.kernels.sparse_mla_prefill import sparse_mla_prefill
from tests.shared.engine.kernels.offline import MAX_SHARED_BYTES, Build, compile_for_hopper

_SCALE = 1 / 16
_ROUNDING = 2e-2


def test_it_compiles_for_hopper_without_spilling_in_a_loop() -> None:
    """Spilt registers would travel through memory in every block; two addresses do once, at the
    kernel's entry.
    """
    wide, narrow = (f"tensordesc<bf16[64, {columns}],{kernel._TILE!r}>" for columns in (256, 64))
    signature = {
        "query_wide": wide,
        "query_narrow": narrow,
        "rows": "*bf16",
        "chosen": "*i32",
        "out": wide,
        "lse": "*fp32",
        "num_queries": "i32",
        "topk": "i32",
        "scale": "fp32",
    }
    options = {"num_warps": 4, "maxnreg": kernel._ENTRY_REGISTERS}
    name = "shared.engine.kernels.sparse_mla_prefill_hopper:_attend"

    builds = [Build(name, signature, {}, options, multiples) for multiples in ((), ("topk",))]

    for compiled in compile_for_hopper(builds):
        assert compiled.spilled_bytes <= 16
        assert compiled.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_queries", "topk"),
    [
        pytest.param(1, 2048, id="one-query"),
        pytest.param(131, 1, id="one-place"),
        pytest.param(133, 128, id="one-multiprocessor-has-two-turns"),
        pytest.param(700, 1990, id="many-turns-and-a-tail"),
        pytest.param(300, 2048, id="all-places"),
    ],
)
@pytest.mark.parametrize("share_missing", [0.0, 0.4])
def test_buffers_pass_from_query_to_query(
    num_queries: int, topk: int, share_missing: float
) -> None:
    torch.manual_seed(0)
    query = torch.randn(num_queries, 64, 576, device="cuda").bfloat16()
    rows = torch.randn(5000, 576, device="cuda").bfloat16()
    chosen = torch.randint(5000, (num_queries, topk), device="cuda", dtype=torch.int32)
    chosen[torch.rand(num_queries, topk, device="cuda") < share_missing] = -1
    chosen[num_queries // 2] = -1

    out, lse = sparse_mla_prefill(query, rows, chosen, _SCALE)

    wanted, wanted_lse = reference.sparse_mla_prefill(query, rows, chosen, 512, _SCALE)
    torch.testing.assert_close(out.float(), wanted, rtol=_ROUNDING, atol=_ROUNDING)
    torch.testing.assert_close(lse, wanted_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_the_same_call_gives_the_same_bits() -> None:
    """A race between the warpgroups would show as a difference sooner or later."""
    torch.manual_seed(0)
    query = torch.randn(400, 64, 576, device="cuda").bfloat16()
    rows = torch.randn(70_000, 576, device="cuda").bfloat16()
    chosen = torch.randint(70_000, (400, 2048), device="cuda", dtype=torch.int32)
    first, first_lse = sparse_mla_prefill(query, rows, chosen, _SCALE)

    for _ in range(30):
        again, again_lse = sparse_mla_prefill(query, rows, chosen, _SCALE)

        assert torch.equal(first, again) and torch.equal(first_lse, again_lse)
