from services.local.status import WORKER_COLUMNS, table, worker_rows
from shared import farspan_pb2 as pb


def test_a_worker_is_one_readable_row() -> None:
    beat = pb.Heartbeat(
        worker=pb.WorkerRef(worker_id="decode-0", epoch=1_700_000_000_000_000_000),
        role=pb.ROLE_DECODE,
        state=pb.SERVICE_STATE_READY,
        layout=pb.KvLayout(kv_format="fp32", dcp_size=1, interleave=64),
        load=pb.Load(num_running=3, free_blocks=7, total_blocks=9, hot_hits=3, hot_misses=1),
    )

    heading, row = table(WORKER_COLUMNS, worker_rows([beat])).splitlines()

    cells = " ".join(row.split())
    assert cells == "decode-0 ready 2023-11-14 22:13:20 fp32 W=1 I=64 3 0 0 7/9 75%"
    assert heading.index("free blocks") == row.index("7/9")


def test_a_column_without_content_is_left_out() -> None:
    """Prefill workers have no hot rows; a fleet of them needs no column for it."""
    assert table(("a", "b", "c"), [("1", "", "3"), ("4", "", "")]) == "a  c\n1  3\n4"
