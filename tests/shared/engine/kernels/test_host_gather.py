"""Missing rows are copied from the host; only placement changes, never what is read."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.forget_rows import forget_rows
from shared.engine.kernels.host_gather import host_gather
from shared.engine.kernels.hot_tables import (
    BatchBlocks,
    HotTables,
    MissPlan,
    Resolution,
    make_scratch,
)
from shared.engine.kernels.reference import residency as reference
from shared.engine.kernels.resolve_rows import resolve_rows
from shared.engine.kv.pinned_pool import pinned_pool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROW = 656


@contextmanager
def host_pool(num_rows: int) -> Iterator[torch.Tensor]:
    """Rows of noise in host memory that the device can read."""
    with pinned_pool(num_rows * ROW) as pool:
        rows = pool.view(num_rows, ROW)
        rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8))
        yield rows


def plan_of(copies: list[list[tuple[int, int]]], width: int = 120) -> MissPlan:
    """A plan of (host row, device row) lists; what lies behind a list is nobody's row."""
    host_rows = torch.full((len(copies), width), 2**31 - 1, dtype=torch.int32)
    device_rows = host_rows.clone()
    for request, pairs in enumerate(copies):
        for number, (host_row, device_row) in enumerate(pairs):
            host_rows[request, number], device_rows[request, number] = host_row, device_row
    counts = torch.tensor([len(pairs) for pairs in copies], dtype=torch.int32)
    return MissPlan(host_rows.to(DEVICE), device_rows.to(DEVICE), counts.to(DEVICE))


def on_cpu(plan: MissPlan) -> MissPlan:
    """The same plan for the reference."""
    return MissPlan(plan.host_rows.cpu(), plan.device_rows.cpu(), plan.num_misses.cpu())


@pytest.mark.parametrize("num_programs", [1, 3, 40])
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([0], id="nothing"),
        pytest.param([1, 0, 0, 2], id="some-requests-miss-nothing"),
        pytest.param([99, 100, 71], id="whole-and-ragged-tiles"),
    ],
)
def test_every_missing_row_is_copied_and_no_other(counts: list[int], num_programs: int) -> None:
    """Whatever the number of programs."""
    sources, targets = torch.randperm(300).tolist(), iter(torch.randperm(300).tolist())
    plan = plan_of([[(sources[n], next(targets)) for n in range(count)] for count in counts])
    before = torch.randint(0, 256, (300, ROW), dtype=torch.uint8)
    with host_pool(300) as host_rows:
        expected = before.clone()
        reference.host_gather(host_rows, expected, on_cpu(plan))

        device_rows = before.to(DEVICE, copy=True)
        host_gather(host_rows, device_rows, plan, num_programs)

        assert torch.equal(device_rows.cpu(), expected)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_what_a_step_reads_is_what_the_host_holds(seed: int) -> None:
    """For the owner's layer and a follower's, which replays the plan on its own plane.

    Rows are rewritten between steps; one block is resident, in both layers.
    """
    torch.manual_seed(seed)
    tables = HotTables.allocate(1, 2, 1, DEVICE)
    for lease in range(2):
        tables.begin(lease, torch.tensor([1 + lease], dtype=torch.int32))
    page_table = torch.randperm(8).view(2, 4).int()
    first_rows = torch.full((8,), -1, dtype=torch.int64)
    first_rows[page_table[0, 1]] = 0
    resident = int(page_table[0, 1]) * 64
    out, scratch = Resolution.allocate(2, 2, 20, DEVICE), make_scratch(2, 8, DEVICE)
    leases = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    with host_pool(2 * 8 * 64) as both:
        layers = both.view(2, 8 * 64, ROW)
        device = torch.zeros(2, 3 * 64, ROW, dtype=torch.uint8, device=DEVICE)
        device[:, :64] = layers[:, resident : resident + 64].to(DEVICE)
        for _ in range(3):
            positions = torch.randint(-8, 256, (2, 2, 20)).clamp_min(-1).int()
            resolve_rows(
                positions.to(DEVICE),
                BatchBlocks(page_table.to(DEVICE), leases, first_rows.to(DEVICE)),
                tables,
                0,
                scratch,
                out,
            )

            for layer in range(2):
                host_gather(layers[layer], device[layer], out.plan, 2)

            row_ids = out.row_ids.cpu()
            assert torch.equal(row_ids < 0, positions < 0)
            request = torch.arange(2)[:, None, None].expand_as(positions)
            block = page_table[request, positions.clamp_min(0) // 64].long()
            chosen = (positions >= 0).flatten()
            host_ids = (block * 64 + positions % 64).flatten()[chosen]
            read = device.cpu()[:, row_ids.flatten()[chosen].long()]
            assert torch.equal(read, layers[:, host_ids])
            rewritten = page_table[:, 3:] * 64 + 5
            layers[:, rewritten.flatten().long()] ^= 255
            forget_rows(rewritten.contiguous().to(DEVICE), leases, tables)


@pytest.mark.parametrize(
    ("host_rows", "device_rows", "num_programs", "complaint"),
    [
        pytest.param((4, 660), (4, ROW), 1, "host_rows must be", id="row-width"),
        pytest.param((4, ROW), (4, 64, ROW), 1, "device_rows must be", id="pages"),
        pytest.param((4, ROW), (4, ROW), 0, "0 programs", id="no-programs"),
    ],
)
def test_what_the_kernel_cannot_copy_is_refused(
    host_rows: tuple[int, ...], device_rows: tuple[int, ...], num_programs: int, complaint: str
) -> None:
    """With words that say what is wrong."""
    host, device = (torch.zeros(shape, dtype=torch.uint8) for shape in (host_rows, device_rows))

    with pytest.raises(ValueError, match=complaint):
        host_gather(host, device, plan_of([[(0, 0)]]), num_programs)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_copied() -> None:
    """Byte offsets pass 32 bits on the host, word offsets on the device."""
    num_host_rows, num_device_rows = 2**31 // ROW + 9, 2**31 // (ROW // 8) + 9
    device_rows = torch.zeros(num_device_rows, ROW, dtype=torch.uint8, device=DEVICE)
    plan = plan_of([[(num_host_rows - 1, num_device_rows - 1), (num_host_rows - 2, 3)]])
    with pinned_pool(num_host_rows * ROW) as pool:
        host_rows = pool.view(num_host_rows, ROW)
        host_rows[-2:] = torch.randint(0, 256, (2, ROW), dtype=torch.uint8)

        host_gather(host_rows, device_rows, plan, 8)

        assert torch.equal(device_rows[-1].cpu(), host_rows[-1])
        assert torch.equal(device_rows[3].cpu(), host_rows[-2])


@pytest.mark.gpu
def test_a_captured_step_follows_its_inputs() -> None:
    """Resolver and gather in one graph: replayed on new positions, without asking the host."""
    tables = HotTables.allocate(1, 2, 2, DEVICE)
    for lease in range(2):
        tables.begin(lease, torch.tensor([lease, 2 + lease], dtype=torch.int32))
    positions = torch.full((2, 1, 40), -1, dtype=torch.int32, device=DEVICE)
    page_table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(2, 4)
    blocks = BatchBlocks(
        page_table,
        torch.arange(2, dtype=torch.int32, device=DEVICE),
        torch.full((8,), -1, dtype=torch.int64, device=DEVICE),
    )
    out, scratch = Resolution.allocate(2, 1, 40, DEVICE), make_scratch(2, 8, DEVICE)
    device_rows = torch.zeros(4 * 64, ROW, dtype=torch.uint8, device=DEVICE)
    with host_pool(8 * 64) as host_rows:

        def step() -> None:
            resolve_rows(positions, blocks, tables, 0, scratch, out)
            host_gather(host_rows, device_rows, out.plan, 4)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for seed in range(4):
            torch.manual_seed(seed)
            chosen = torch.stack([torch.randperm(256)[:40] for _ in range(2)])
            positions.copy_(chosen[:, None].int())
            torch.cuda.set_sync_debug_mode("error")

            graph.replay()

            torch.cuda.set_sync_debug_mode("default")
            read = device_rows[out.row_ids.flatten().long()].cpu()
            assert torch.equal(read, host_rows[(chosen + torch.tensor([[0], [256]])).flatten()])
