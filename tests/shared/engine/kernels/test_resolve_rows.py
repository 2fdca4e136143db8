"""Selected positions become device rows; what is missing takes the least recently used hot rows."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.kernels.hot_tables import BatchBlocks, HotTables, Resolution, make_scratch
from shared.engine.kernels.reference import residency as reference
from shared.engine.kernels.resolve_rows import resolve_rows
from shared.engine.kv.hot_rows import HotRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
NUM_BLOCKS = 40
NOT_RESIDENT = -(1 << 40)


@dataclass
class Step:
    """One step's selections, of four requests; the third has no lease."""

    positions: torch.Tensor
    page_table: torch.Tensor = field(
        default_factory=lambda: torch.arange(32, dtype=torch.int32).view(4, 8).flip(1)
    )
    leases: torch.Tensor = field(
        default_factory=lambda: torch.tensor([2, 0, -1, 3], dtype=torch.int32)
    )
    first_rows: torch.Tensor = field(
        default_factory=lambda: torch.full((NUM_BLOCKS,), NOT_RESIDENT, dtype=torch.int64)
    )

    def blocks(self, device: torch.device) -> BatchBlocks:
        """Where the requests' blocks lie."""
        parts = (self.page_table, self.leases, self.first_rows)
        return BatchBlocks(*(part.to(device) for part in parts))

    def run(self, tables: HotTables, group_idx: int = 0) -> Resolution:
        """The kernel's result, on the CPU; the tables are on the device."""
        out = Resolution.allocate(*self.positions.shape, device=DEVICE)
        scratch = make_scratch(len(self.positions), len(self.first_rows), DEVICE)
        before = scratch.clone()
        blocks = self.blocks(DEVICE)
        resolve_rows(self.positions.to(DEVICE), blocks, tables, group_idx, scratch, out)
        assert torch.equal(scratch, before), "the scratch is left as it was"
        return out

    def meaning(self, tables: HotTables, group_idx: int = 0) -> Resolution:
        """The reference's result."""
        out = Resolution.allocate(*self.positions.shape, device=CPU)
        reference.resolve_rows(self.positions, self.blocks(CPU), tables, group_idx, out)
        return out


def hot_tables(device: torch.device, hot_pages: int = 1) -> HotTables:
    """Two groups, four leases of the pages from 100 on."""
    tables = HotTables.allocate(2, 4, hot_pages, device)
    pages = 100 + torch.arange(4 * hot_pages, dtype=torch.int32)
    for lease, lent in enumerate(pages.view(4, hot_pages)):
        tables.begin(lease, lent)
    return tables


def selection(*requests: list[list[int]]) -> torch.Tensor:
    """[4, queries, top_k] positions; requests not given select nothing."""
    chosen = torch.full((4, len(requests[0]), len(requests[0][0])), -1, dtype=torch.int32)
    chosen[: len(requests)] = torch.tensor(requests)
    return chosen


def planned(out: Resolution, request: int) -> list[tuple[int, int]]:
    """The request's copies: (host row, device row)."""
    count = int(out.plan.num_misses[request])
    host_rows, device_rows = (
        rows[request, :count].tolist() for rows in (out.plan.host_rows, out.plan.device_rows)
    )
    return list(zip(host_rows, device_rows, strict=True))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**20), top_k=st.sampled_from([7, 16]), span=st.sampled_from([40, 512]))
def test_rows_plan_counts_and_tables_equal_the_reference(seed: int, top_k: int, span: int) -> None:
    """Over a few steps: repeats within and between query rows, -1, resident and cold blocks."""
    torch.manual_seed(seed)
    tables, expected_tables = hot_tables(DEVICE), hot_tables(CPU)
    for number in range(3):
        step = Step(torch.randint(-5, span, (4, 2, top_k)).clamp_min(-1).int())
        step.first_rows[::3] = torch.arange(0, NUM_BLOCKS, 3) * 64
        expected = step.meaning(expected_tables, number % 2)

        out = step.run(tables, number % 2)

        assert torch.equal(out.row_ids.cpu(), expected.row_ids)
        assert torch.equal(out.counts.cpu(), expected.counts)
        assert [planned(out, r) for r in range(4)] == [planned(expected, r) for r in range(4)]
        assert torch.equal(tables.keys.cpu(), expected_tables.keys)
        assert torch.equal(tables.order.cpu(), expected_tables.order)


@settings(max_examples=6, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 150), min_size=1, max_size=64), min_size=2, max_size=6)
)
def test_the_cpu_engines_hot_rows_miss_the_same_rows(steps: list[list[int]]) -> None:
    """Until rows that were last used in one step are evicted in part: their order is free."""
    tables, twin = hot_tables(DEVICE), HotRows(1, torch.arange(64).numpy())
    scratch = torch.full((NUM_BLOCKS * 64,), -1, dtype=torch.int32).numpy()
    content: dict[int, int] = {}  # device row -> step of its last use
    for number, wanted in enumerate(steps):
        step = Step(selection([wanted + [-1] * (64 - len(wanted))]))
        step.page_table[0] = torch.arange(8)

        out = step.run(tables)
        found = twin.look_up(0, torch.tensor(wanted).numpy(), scratch)

        missing = {row for row, _ in planned(out, 0)}
        assert missing == set(found.missing_host_rows.tolist())
        assert out.counts[0, 1] == found.num_hits
        taken = [row for _, row in planned(out, 0) if row in content]
        kept = content.keys() - set(taken) - set(out.row_ids[0].flatten().tolist())
        assert all(content[row] <= content[other] for row in taken for other in kept)
        tied = {content[row] for row in taken} & {content[row] for row in kept}
        content.update(dict.fromkeys(out.row_ids[0, 0, : len(wanted)].tolist(), number))
        if tied:
            return


def test_all_query_rows_of_a_request_are_one_set() -> None:
    """A row that two of them select is fetched once, and none that is read is evicted."""
    tables = hot_tables(DEVICE)

    out = Step(selection([[7, 8], [8, 9]])).run(tables)

    # Position 7 lies in the request's first block, which is block 7.
    assert [row for row, _ in planned(out, 0)] == [7 * 64 + 7, 7 * 64 + 8, 7 * 64 + 9]
    assert out.row_ids[0, 0, 1] == out.row_ids[0, 1, 0]


def test_requests_use_their_own_leases() -> None:
    """Two requests that share a block fetch it each."""
    tables, step = hot_tables(DEVICE), Step(selection([[3]], [[3]]))
    step.page_table[1] = step.page_table[0]

    out = step.run(tables)

    assert [planned(out, 0)[0][0], planned(out, 1)[0][0]] == [7 * 64 + 3] * 2
    assert out.row_ids[:2, 0, 0].cpu().div(64, rounding_mode="floor").tolist() == [102, 100]


def test_resident_pages_are_read_in_place() -> None:
    """They touch no hot row, so the order stays."""
    tables, step = hot_tables(DEVICE), Step(selection([[3, 70, -1]]))
    order = tables.order.clone()
    step.first_rows[7], step.first_rows[6] = 5 * 64, 2 * 64

    out = step.run(tables)

    assert out.row_ids[0, 0].tolist() == [5 * 64 + 3, 2 * 64 + 6, -1]
    assert out.plan.num_misses.tolist() == [0] * 4
    assert out.counts[0].tolist() == [2, 0, 0]
    assert torch.equal(tables.order, order)


def test_groups_do_not_share_rows() -> None:
    """Another group's layers have fetched other planes."""
    tables, step = hot_tables(DEVICE), Step(selection([[3]]))
    step.run(tables, group_idx=0)

    assert len(planned(step.run(tables, group_idx=1), 0)) == 1
    assert len(planned(step.run(tables, group_idx=1), 0)) == 0


def test_cold_rows_without_a_lease_are_counted_and_read_nowhere() -> None:
    """The host sees the count when it confirms the step."""
    step = Step(selection([[-1]], [[-1]], [[9]]))

    out = step.run(hot_tables(DEVICE))

    assert out.row_ids[2].tolist() == [[-1]]
    assert out.counts[2].tolist() == [0, 0, 1]


def test_a_lease_that_begins_anew_holds_nothing() -> None:
    """The pages had another content meanwhile."""
    tables, step = hot_tables(DEVICE), Step(selection([[3]]))
    step.run(tables)

    tables.begin(2, torch.tensor([77], dtype=torch.int32))

    out = step.run(tables)
    assert len(planned(out, 0)) == 1
    assert int(out.row_ids[0, 0, 0]) // 64 == 77


def test_no_requests_are_no_work() -> None:
    """An empty batch may be a graph's smallest."""
    step = Step(torch.empty((0, 1, 4), dtype=torch.int32))
    step.page_table, step.leases = step.page_table[:0], step.leases[:0]

    assert step.run(hot_tables(DEVICE)).row_ids.shape == (0, 1, 4)


def test_more_hot_rows_than_the_order_can_number_are_refused() -> None:
    """Its entries have 16 bits."""
    with pytest.raises(ValueError, match="32768 hot rows"):
        HotTables.allocate(1, 1, 512, CPU)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param({"positions": torch.zeros(4, 1, 2).long()}, "int32", id="wide-positions"),
        pytest.param({"positions": torch.zeros(4, 1, 80).int()}, "64 hot rows", id="small-lease"),
        pytest.param({"page_table": torch.zeros(3, 8).int()}, "equally many", id="page-table"),
        pytest.param({"leases": torch.zeros(4).long()}, "leases must be int32", id="wide-leases"),
        pytest.param({"first_rows": torch.zeros(9).long()}, "9 blocks", id="scratch"),
    ],
)
def test_what_the_kernel_cannot_resolve_is_refused(
    change: dict[str, torch.Tensor], complaint: str
) -> None:
    """With words that say what is wrong."""
    step = Step(**{"positions": selection([[1, 2]]), **change})
    out = Resolution.allocate(*step.positions.shape, device=CPU)
    scratch = make_scratch(4, NUM_BLOCKS, CPU)

    with pytest.raises(ValueError, match=complaint):
        resolve_rows(step.positions, step.blocks(CPU), hot_tables(CPU), 0, scratch, out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_queries", "hot_pages"), [(1, 64), (3, 160), (4, 128)], ids=["one", "three", "four"]
)
def test_released_sizes_equal_the_reference(num_queries: int, hot_pages: int) -> None:
    """Top-k 2,048 of one to four query rows."""
    torch.manual_seed(0)
    tables, expected_tables = hot_tables(DEVICE, hot_pages), hot_tables(CPU, hot_pages)
    page_table = torch.randperm(2400)[: 4 * 600].view(4, 600).int()
    first_rows = torch.full((2400,), NOT_RESIDENT, dtype=torch.int64)
    first_rows[::7] = torch.arange(0, 2400, 7) * 64
    span = min(600 * 64, num_queries * 6144)
    for _ in range(4):
        rows = [torch.randperm(span)[:2048] for _ in range(4 * num_queries)]
        positions = torch.stack(rows).view(4, num_queries, 2048).int()
        step = Step(positions, page_table, first_rows=first_rows)
        expected = step.meaning(expected_tables)

        out = step.run(tables)

        assert torch.equal(out.row_ids.cpu(), expected.row_ids)
        assert [planned(out, r) for r in range(4)] == [planned(expected, r) for r in range(4)]
        assert torch.equal(tables.order.cpu(), expected_tables.order)


@pytest.mark.gpu
def test_tables_past_two_to_the_31_elements_are_found() -> None:
    """The last lease and the last request begin beyond 32 bits."""
    num_leases, hot_rows = 2**31 // 16384 + 2, 16384
    tables = HotTables(
        torch.zeros(num_leases, hot_rows // 64, dtype=torch.int32, device=DEVICE),
        torch.full((1, num_leases, hot_rows), -1, dtype=torch.int32, device=DEVICE),
        torch.arange(hot_rows, dtype=torch.int16, device=DEVICE).repeat(1, num_leases, 1),
    )
    page_table = torch.zeros(3, 2**30 + 64, dtype=torch.int32, device=DEVICE)
    page_table[2, 0] = 5
    out = Resolution.allocate(3, 1, 1, DEVICE)
    leases = torch.tensor([-1, -1, num_leases - 1], dtype=torch.int32, device=DEVICE)
    first_rows = torch.full((8,), NOT_RESIDENT, dtype=torch.int64, device=DEVICE)
    positions = torch.tensor([-1, -1, 9], dtype=torch.int32, device=DEVICE).view(3, 1, 1)

    scratch = make_scratch(3, 8, DEVICE)
    resolve_rows(positions, BatchBlocks(page_table, leases, first_rows), tables, 0, scratch, out)

    assert planned(out, 2) == [(5 * 64 + 9, 0)]
    assert tables.keys[0, -1, 0] == 5 * 64 + 9
