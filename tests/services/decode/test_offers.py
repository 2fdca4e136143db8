"""What refuses an offer before room is asked for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.decode.offers import Terms, check
from shared import farspan_pb2 as pb
from shared.block_hash import block_hashes, namespace, pack, token_bytes
from shared.errors import BadRequest, DeadlineExceeded, FarspanError, TooLong, WorkerLost
from shared.grammar import Vocabulary

WORKER = pb.WorkerRef(worker_id="d0", epoch=5)
LAYOUT = pb.KvLayout(
    model_fingerprint="f1",
    kv_format="fp32",
    block_tokens=64,
    dcp_size=1,
    interleave=64,
    num_mla_layers=7,
    num_index_layers=4,
    row_bytes=2304,
    index_page_bytes=32768,
)
VOCABULARY = Vocabulary(Path("no checkpoint"), 4096)
TERMS = Terms(WORKER, LAYOUT, VOCABULARY, max_position=1000, reads_gpu_memory=False)
NOW_MS = 1_000_000


def ranks(*kinds: str) -> list[pb.RankRegions]:
    return [
        pb.RankRegions(agent_name=f"p0-{rank}", memory_kind=kind) for rank, kind in enumerate(kinds)
    ]


def offer(num_tokens: int = 200, **changes: Any) -> pb.HandoffOffer:
    """A good offer from two ranks, or as changed."""
    ids, root = list(range(num_tokens)), namespace("m", "f1")
    layout = pb.KvLayout()
    layout.CopyFrom(LAYOUT)
    layout.dcp_size = 2
    made = pb.HandoffOffer(
        request_id="r",
        prefill=pb.WorkerRef(worker_id="p0", epoch=3),
        decode=WORKER,
        token_ids=token_bytes(ids),
        block_hashes=pack(block_hashes(root, ids)),
        hash_root=root,
        sampling=pb.SamplingParams(max_new_tokens=10, top_p=1.0),
        gateway_id="g",
        deadline_unix_ms=NOW_MS + 1,
        layout=layout,
        ranks=ranks("DRAM", "DRAM"),
        blocks=[pb.BlockRef(block_id=i, generation=1) for i in range(-(-num_tokens // 128))],
        lease_ms=1000,
    )
    for name, value in changes.items():
        made.ClearField(name)  # type: ignore[arg-type]
        made.MergeFrom(pb.HandoffOffer(**{name: value}))
    return made


def changed_layout(**changes: Any) -> pb.KvLayout:
    layout = offer().layout
    for name, value in changes.items():
        setattr(layout, name, value)
    return layout


def test_a_good_offer_is_taken() -> None:
    """Ranks and interleave are the sender's own."""
    check(offer(), TERMS, NOW_MS)
    check(offer(layout=changed_layout(interleave=1)), TERMS, NOW_MS)
    with_cuda = replace(TERMS, reads_gpu_memory=True)
    check(offer(ranks=ranks("VRAM", "VRAM")), with_cuda, NOW_MS)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        pytest.param({"decode": pb.WorkerRef(worker_id="d0", epoch=4)}, WorkerLost, id="epoch"),
        pytest.param({"request_id": ""}, BadRequest, id="no-request-id"),
        pytest.param({"gateway_id": ""}, BadRequest, id="no-gateway"),
        pytest.param({"lease_ms": 0}, BadRequest, id="no-lease"),
        pytest.param({"hash_root": b""}, BadRequest, id="no-hash-root"),
        pytest.param({"block_hashes": b""}, BadRequest, id="no-hashes"),
        pytest.param({"token_ids": b""}, BadRequest, id="no-tokens"),
        pytest.param({"token_ids": b"abc"}, BadRequest, id="half-a-token"),
        pytest.param({"token_ids": token_bytes([4096] * 200)}, BadRequest, id="unknown-token"),
        pytest.param({"num_resumed_tokens": 200}, BadRequest, id="no-prompt"),
        pytest.param({"blocks": [pb.BlockRef(block_id=1)]}, BadRequest, id="too-few-blocks"),
        pytest.param({"ranks": [pb.RankRegions()]}, BadRequest, id="too-few-ranks"),
        pytest.param({"ranks": ranks("DRAM") * 2}, BadRequest, id="one-rank-twice"),
        pytest.param({"ranks": ranks("DRAM", "VRAM")}, BadRequest, id="two-kinds-of-memory"),
        pytest.param({"ranks": ranks("", "")}, BadRequest, id="no-kind-of-memory"),
        pytest.param({"ranks": ranks("VRAM", "VRAM")}, WorkerLost, id="memory-it-cannot-read"),
        pytest.param({"sampling": pb.SamplingParams()}, BadRequest, id="no-answer"),
        pytest.param(
            {"sampling": pb.SamplingParams(max_new_tokens=9, top_p=1.0, stop_token_ids=[4096])},
            BadRequest,
            id="unknown-stop-token",
        ),
        pytest.param({"deadline_unix_ms": NOW_MS}, DeadlineExceeded, id="too-late"),
        pytest.param({"layout": changed_layout(interleave=7)}, BadRequest, id="interleave"),
        pytest.param(
            {"layout": changed_layout(model_fingerprint="f2")}, WorkerLost, id="other-model"
        ),
        pytest.param({"layout": changed_layout(kv_format="x")}, WorkerLost, id="other-format"),
        pytest.param({"layout": changed_layout(row_bytes=656)}, WorkerLost, id="other-rows"),
    ],
)
def test_a_wrong_offer_is_refused(changes: dict[str, Any], error: type[FarspanError]) -> None:
    """KV of another layout read as ours would be wrong tokens; another worker may do."""
    with pytest.raises(error):
        check(offer(**changes), TERMS, NOW_MS)


def test_a_prompt_that_leaves_no_position_is_too_long() -> None:
    with pytest.raises(TooLong):
        check(offer(1000), TERMS, NOW_MS)
