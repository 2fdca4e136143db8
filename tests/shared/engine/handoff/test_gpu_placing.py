"""Decode on a GPU pulls KV out of other processes' GPU memory, and gets the right rows or an error.

The peers are on the last GPU, decode on the first: with one GPU that is the same.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from shared import farspan_pb2 as pb
from shared.engine.handoff.importer import KvImporter, StaleRef
from shared.engine.handoff.staging import allocate_slots
from shared.errors import ConfigError, WorkerLost
from tests.shared.engine.handoff.kv_peers import Held, Pages, Peer, pull_while_it_changes

pytestmark = pytest.mark.gpu

LOCAL = {"UCX_NET_DEVICES": "lo"}
HERE = "cuda:0"
THERE = f"cuda:{max(0, torch.cuda.device_count() - 1)}"


@pytest.fixture(scope="module", autouse=True)
def use_loopback() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOCAL.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Peer]]:
    """Two rank processes for the tests that leave them alive."""
    peers = [Peer(LOCAL) for _ in range(2)]
    yield peers
    for peer in peers:
        peer.close()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"


def exported(peers: list[Peer], held: Held, device: str = THERE) -> list[pb.RankRegions]:
    return [peers[rank].export(held, rank, device) for rank in range(held.size)]


def importer_for(held: Held, *, slots: int = 8, device: str = HERE) -> KvImporter:
    layout = held.layout
    slot_bytes = 64 * layout.row_bytes * layout.num_mla_layers
    slot_bytes += layout.index_page_bytes * layout.num_index_layers
    return KvImporter(
        "decode",
        layout,
        staging_bytes=slots * slot_bytes,
        num_lanes=1,
        device=torch.device(device),
    )


@pytest.mark.parametrize("source", ["cpu", THERE])
@pytest.mark.parametrize("interleave", [1, 64])
@pytest.mark.parametrize("size", [1, 2])
def test_a_sequence_comes_over_in_token_order_chunk_by_chunk(
    ranks: list[Peer], size: int, interleave: int, source: str
) -> None:
    """From GPU memory and from host memory alike; rows past the end keep what was there.

    The staging holds two effective blocks, so each pull takes several pieces.
    """
    held = Held(size, interleave, num_tokens=641 if size > 1 else 345)
    regions = exported(ranks, held, source)
    importer = importer_for(held, slots=2 * size)
    pages = Pages(held, HERE)

    assert {each.memory_kind for each in regions} == {"DRAM" if source == "cpu" else "VRAM"}
    importer.pull(pages.request(regions, last_token=128))
    assert pages.holds(0, 128)
    importer.pull(pages.request(regions, first_token=128, last_token=320))
    assert pages.holds(0, 320)
    importer.pull(pages.request(regions, first_token=320))
    assert pages.holds(0, held.num_tokens)


def test_a_decode_worker_without_a_gpu_is_warned_once(
    ranks: list[Peer], caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes are right, and slow where there is no RDMA."""
    held = Held(1, 64)
    regions = exported(ranks, held)
    importer, pages = importer_for(held, device="cpu"), Pages(held)

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            importer.pull(pages.request(regions))

    assert pages.holds(0, held.num_tokens)
    assert len([each for each in caplog.records if "out of GPUs" in each.message]) == 1


@pytest.mark.parametrize("interleave", [1, 64])
def test_a_block_given_to_another_request_is_refused(ranks: list[Peer], interleave: int) -> None:
    """Also when a single rank has moved on, and before anything reaches the pages."""
    held = Held(2, interleave)
    regions = exported(ranks, held)
    last = held.blocks[1]
    ranks[1].ask("set_word", 1 + last.block_id, last.generation + 1)
    pages = Pages(held, HERE)

    with pytest.raises(StaleRef, match="another request"):
        importer_for(held).pull(pages.request(regions))

    assert pages.holds(0, 0)


def test_a_pull_in_another_epoch_is_refused(ranks: list[Peer]) -> None:
    """The offer was made by an earlier life of the worker."""
    held = Held(1, 64)
    regions = exported(ranks, held)
    pages = Pages(held, HERE)

    with pytest.raises(StaleRef, match="epoch"):
        importer_for(held).pull(pages.request(regions, epoch=held.epoch + 1))

    assert pages.holds(0, 0)


def test_ranks_in_memory_of_two_kinds_are_refused(ranks: list[Peer]) -> None:
    """One worker has one setting, so the offer is mistaken or forged."""
    held = Held(2, 64)
    regions = [ranks[0].export(held, 0, THERE), ranks[1].export(held, 1, "cpu")]

    with pytest.raises(WorkerLost, match="different kinds"):
        importer_for(held).pull(Pages(held, HERE).request(regions))


def test_rows_of_two_owners_never_pass_as_one_block(ranks: list[Peer]) -> None:
    """While the owner rewrites the block all the time, what is accepted is whole and as asked for.

    The block is 268 MB, so that reuse falls into reads; the second check must catch each of those.
    """
    held = Held(1, 64, num_tokens=64, num_blocks=2, num_mla_layers=512, row_bytes=8192)
    regions = exported(ranks, held)
    importer, pages = importer_for(held, slots=1), Pages(held, HERE)
    ranks[0].ask("churn", held.blocks[0].block_id, 0.016)

    accepted, refused = pull_while_it_changes(
        ranks[0], importer, pages, regions, wanted=5, within_s=30
    )

    assert accepted >= 5
    assert refused >= 5


def test_a_killed_rank_is_lost_and_the_others_go_on() -> None:
    """The driver frees a dead process's memory; what is mapped here of it is not trusted."""
    held = Held(1, 64)
    with closing(Peer(LOCAL)) as dying, closing(Peer(LOCAL)) as living:
        doomed, healthy = [dying.export(held, 0, THERE)], [living.export(held, 0, THERE)]
        importer = importer_for(held)
        importer.pull(Pages(held, HERE).request(doomed))
        dying.signal(signal.SIGKILL)

        for _ in range(2):
            with pytest.raises(WorkerLost):
                importer.pull(Pages(held, HERE).request(doomed, deadline_s=10.0))
        pages = Pages(held, HERE)
        importer.pull(pages.request(healthy))

        assert pages.holds(0, held.num_tokens)
        assert importer.num_quarantined_lanes == 0


def test_a_dead_ranks_gpu_memory_is_given_back() -> None:
    """It stays taken while it is mapped here, and a restarted rank would find no room."""
    held = Held(1, 64, num_tokens=64, num_blocks=64, num_mla_layers=64, row_bytes=8192)
    with closing(Peer(LOCAL)) as dying:
        regions = exported([dying], held)
        importer = importer_for(held)
        importer.pull(Pages(held, HERE).request(regions))
        importer.give_back_dead_memory()
        importer.pull(Pages(held, HERE).request(regions))
        device = int(THERE.removeprefix("cuda:"))
        before, _ = torch.cuda.mem_get_info(device)
        dying.signal(signal.SIGKILL)

        def is_given_back() -> bool:
            importer.give_back_dead_memory()
            return torch.cuda.mem_get_info(device)[0] - before > 2 << 30

        wait_until(is_given_back)
        with pytest.raises(WorkerLost):
            importer.pull(Pages(held, HERE).request(regions))


def test_a_full_gpu_still_takes_what_it_was_promised(ranks: list[Peer]) -> None:
    """All memory of a pull is there before the first one; only a new peer's mapping is added."""
    held = Held(2, 1)
    importer, pages = importer_for(held), Pages(held, HERE)
    regions = exported(ranks, held)
    hoard = []
    for size in (1 << 30, 1 << 26, 1 << 21):
        try:
            while True:
                hoard.append(torch.empty(size, dtype=torch.uint8, device=HERE))
        except torch.OutOfMemoryError:
            pass

    importer.pull(pages.request(regions))

    hoard.clear()
    torch.cuda.empty_cache()
    assert pages.holds(0, held.num_tokens)


def test_staging_that_does_not_fit_the_gpu_is_a_wrong_setting() -> None:
    """The worker does not start."""
    held = Held(1, 64)
    _, total = torch.cuda.mem_get_info(0)
    num_slots = 2 * total // (64 * held.row_bytes * held.num_mla_layers)

    with pytest.raises(ConfigError, match="staging"):
        allocate_slots(held.layout, num_slots, torch.device(HERE))


def test_memory_that_no_process_can_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expandable segments are mapped piece by piece; a read of them would fail or crawl."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    with pytest.raises(ConfigError, match="expandable segments"):
        importer_for(Held(1, 64))
