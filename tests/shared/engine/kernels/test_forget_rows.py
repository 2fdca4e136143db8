"""A rewritten row's copies are stale: the next step fetches it again."""

import pytest
import torch

from shared.engine.kernels.forget_rows import forget_rows
from shared.engine.kernels.hot_tables import HotTables
from shared.engine.kernels.reference import residency as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def filled_tables() -> HotTables:
    """Two groups and three leases that all hold rows 0..31 at random places."""
    tables = HotTables.allocate(2, 3, 1, torch.device("cpu"))
    for keys in tables.keys.flatten(0, 1):
        keys[torch.randperm(64)[:32]] = torch.arange(32, dtype=torch.int32)
    return tables


@pytest.mark.parametrize(
    ("host_rows", "leases"),
    [
        pytest.param([[4], [31]], [2, 0], id="one-row-each"),
        pytest.param([[4, 5, 6], [9, -1, -1]], [1, 0], id="some-have-fewer"),
        pytest.param([[99], [-1]], [0, 1], id="rows-that-are-not-hot"),
        pytest.param([[4], [5]], [-1, 1], id="a-request-without-a-lease"),
    ],
)
def test_rewritten_rows_leave_all_groups_of_their_lease(
    host_rows: list[list[int]], leases: list[int]
) -> None:
    """Other leases keep their copies: no other sequence holds a block that is rewritten."""
    expected = filled_tables()
    held = (expected.pages, expected.keys, expected.order)
    tables = HotTables(*(tensor.to(DEVICE, copy=True) for tensor in held))
    rows, lent = torch.tensor(host_rows).int(), torch.tensor(leases).int()
    reference.forget_rows(rows, lent, expected)

    forget_rows(rows.to(DEVICE), lent.to(DEVICE), tables)

    assert torch.equal(tables.keys.cpu(), expected.keys)


def test_no_rows_are_no_work() -> None:
    """A step in which nothing is rewritten."""
    tables = filled_tables()
    before = tables.keys.clone()

    forget_rows(torch.empty((2, 0)).int(), torch.zeros(2).int(), tables)

    assert torch.equal(tables.keys, before)


@pytest.mark.parametrize(
    ("host_rows", "leases", "complaint"),
    [
        pytest.param(torch.zeros(2, 1).long(), torch.zeros(2).int(), "int32", id="wide-rows"),
        pytest.param(torch.zeros(2, 1).int(), torch.zeros(3).int(), "2 int32", id="leases"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    host_rows: torch.Tensor, leases: torch.Tensor, complaint: str
) -> None:
    """With words that say what is wrong."""
    with pytest.raises(ValueError, match=complaint):
        forget_rows(host_rows, leases, filled_tables())


@pytest.mark.gpu
def test_tables_past_two_to_the_31_elements_are_found() -> None:
    """The second group of the last lease lies beyond 32 bits."""
    keys = torch.full((2, 2**16 + 1, 16384), -1, dtype=torch.int32, device=DEVICE)
    keys[1, -1, 7] = 33
    tables = HotTables(torch.empty(0), keys, torch.empty(0))
    lease = torch.tensor([2**16], dtype=torch.int32, device=DEVICE)

    forget_rows(torch.tensor([[33]], dtype=torch.int32, device=DEVICE), lease, tables)

    assert keys[1, -1, 7] == -1
