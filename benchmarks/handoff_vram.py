"""How fast decode pulls KV out of prefill's GPU memory, at GLM-5.3's shapes, through the real path.

Prefill's ranks are processes of their own on the last GPU; decode is on the first, its row pool in
pinned host memory. Reading (NIXL, between GPUs or within one) and placing (a kernel, over PCIe) are
timed apart. Of one pull they follow one another; the service has four pulls at once.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from benchmarks import report
from shared import farspan_pb2 as pb
from shared.engine.handoff.exporter import KvExporter
from shared.engine.handoff.importer import KvImporter, PullRequest
from shared.engine.handoff.placing import Destination, Placer, Staged
from shared.engine.handoff.reader import ReadCounts
from shared.engine.kv.pinned_pool import pinned_pool

_LAYERS, _INDEX_LAYERS = 79, 22  # the MTP layer's among them
_ROW_BYTES, _INDEX_PAGE_BYTES = 656, 8448
_TOKENS = {"4k": 4096, "64k": 65_536}
_PULL_TOKENS = 4096  # of one pull of the service
_NUM_LANES = 4
_STAGING_BYTES = 1 << 30
_REPEATS = 5
_EPOCH = 1
_COPY_BYTES = 1 << 30


class _Timed:
    """Seconds spent in placing, of all pulls."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self.seconds = 0.0

    def place(self, staged: Staged, destination: Destination) -> None:
        begun_s = time.perf_counter()
        self._placer.place(staged, destination)
        self.seconds += time.perf_counter() - begun_s


def measure() -> dict[str, float]:
    """All figures; less than a minute."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    torch.cuda.set_device(0)
    figures = _link()
    for num_ranks, interleave in ((1, 64), (2, 1)):
        with _ranks(num_ranks) as regions, _destination() as destination:
            found = _pulls(regions, interleave, destination)
        suffix = "" if num_ranks == 1 else f"_{num_ranks}_ranks_by_token"
        figures |= {
            f"{name}{suffix}_{figure}": value
            for name, measured in found.items()
            for figure, value in measured.items()
        }
    figures["pull_64k_at_once_of_link"] = (
        figures["pull_64k_at_once_gb_per_s"] / figures["pinned_write_gb_per_s"]
    )
    return figures


def _link() -> dict[str, float]:
    """What the links give to a plain copy: GPU to pinned host memory, and within GPU memory."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    pinned = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    other = torch.zeros_like(source, device=f"cuda:{torch.cuda.device_count() - 1}")

    def copies(target: torch.Tensor) -> float:
        times = []
        for _ in range(_REPEATS):
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun_s)
        return _COPY_BYTES / min(times) / 1e9

    return {
        "num_gpus": torch.cuda.device_count(),
        "pinned_write_gb_per_s": copies(pinned),
        "gpu_to_gpu_copy_gb_per_s": copies(other),
    }


def _pulls(
    regions: Sequence[pb.RankRegions], interleave: int, destination: Destination
) -> dict[str, dict[str, float]]:
    importer = KvImporter(
        "decode",
        _layout(),
        staging_bytes=_STAGING_BYTES,
        num_lanes=_NUM_LANES,
        device=torch.device("cuda", 0),
    )
    placer = importer._placer = _Timed(importer._placer)

    def request(first: int, last: int) -> PullRequest:
        num_blocks = -(-last // (64 * len(regions)))
        return PullRequest(
            ranks=regions,
            blocks=[pb.BlockRef(block_id=block, generation=1) for block in range(num_blocks)],
            epoch=_EPOCH,
            interleave=interleave,
            first_token=first,
            last_token=last,
            deadline_s=30.0,
            destination=destination,
        )

    importer.pull(request(0, _PULL_TOKENS))  # connects and maps
    figures = {}
    for name, num_tokens in _TOKENS.items():
        best: dict[str, float] = {}
        for _ in range(_REPEATS):
            placer.seconds = 0.0
            whole = request(0, num_tokens)
            begun_s = time.perf_counter()
            counts = importer.pull(whole)
            took_s = time.perf_counter() - begun_s
            if not best or took_s * 1e3 < best["ms"]:
                best = _split(took_s, placer.seconds, counts)
        figures[f"pull_{name}"] = best
    requests = [
        request(first, first + _PULL_TOKENS) for first in range(0, _TOKENS["64k"], _PULL_TOKENS)
    ]
    times = []
    with ThreadPoolExecutor(_NUM_LANES) as threads:
        for _ in range(_REPEATS):
            before = importer.counts.num_bytes
            begun_s = time.perf_counter()
            list(threads.map(importer.pull, requests))
            times.append(time.perf_counter() - begun_s)
    moved = importer.counts.num_bytes - before
    figures["pull_64k_at_once"] = {
        "ms": min(times) * 1e3,
        "gb_per_s": moved / min(times) / 1e9,
    }
    _check(destination, len(regions), interleave)
    return figures


def _split(took_s: float, placing_s: float, counts: ReadCounts) -> dict[str, float]:
    reading_s = took_s - placing_s
    return {
        "mb": counts.num_bytes / 1e6,
        "descriptors": counts.num_descriptors,
        "ms": took_s * 1e3,
        "read_ms": reading_s * 1e3,
        "place_ms": placing_s * 1e3,
        "gb_per_s": counts.num_bytes / took_s / 1e9,
        "read_gb_per_s": counts.num_bytes / reading_s / 1e9,
        "place_gb_per_s": counts.num_bytes / placing_s / 1e9,
    }


def _check(destination: Destination, num_ranks: int, interleave: int) -> None:
    """A speed of wrong bytes is none."""
    for token in range(0, _TOKENS["64k"], 4097):
        rank, block = token // interleave % num_ranks, token // (64 * num_ranks)
        page = destination.page_ids[token // 64]
        row = destination.host_rows[:, page, token % 64]
        key = destination.index_pages[:, page, 128 * (token % 64)]
        if (row != _fill(block, rank)).any() or (key != _fill(block, rank)).any():
            raise RuntimeError(f"token {token} came over wrong")


def _fill(block: int, rank: int) -> int:
    """The byte that a rank's block is full of."""
    return (2 * block + rank) % 251


def _layout() -> pb.KvLayout:
    return pb.KvLayout(
        kv_format="fp8_ds_mla",
        block_tokens=64,
        num_mla_layers=_LAYERS,
        num_index_layers=_INDEX_LAYERS,
        row_bytes=_ROW_BYTES,
        index_page_bytes=_INDEX_PAGE_BYTES,
    )


@contextmanager
def _destination() -> Iterator[Destination]:
    """Decode's pools, the pages of the sequence in reverse order."""
    num_pages = _TOKENS["64k"] // 64
    shape = (_LAYERS, num_pages, 64, _ROW_BYTES)
    index = torch.zeros(
        _INDEX_LAYERS, num_pages, _INDEX_PAGE_BYTES, dtype=torch.uint8, device="cuda"
    )
    with pinned_pool(_LAYERS * num_pages * 64 * _ROW_BYTES) as pool:
        yield Destination(pool.view(shape), index, list(reversed(range(num_pages))))


@contextmanager
def _ranks(num_ranks: int) -> Iterator[list[pb.RankRegions]]:
    """A prefill worker's ranks, with blocks enough for the longest pull."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, num_ranks), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        yield [pb.RankRegions.FromString(end.recv()) for end in ends]
    finally:
        for end, process in zip(ends, processes, strict=True):
            end.close()
            process.join()


def _serve(calls: Connection, rank: int, num_ranks: int) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    num_blocks = _TOKENS["64k"] // (64 * num_ranks)
    fill = torch.tensor([_fill(block, rank) for block in range(num_blocks)], dtype=torch.uint8)
    fill = fill.to(device)
    rows = fill[:, None, None, None].expand(-1, _LAYERS, 64, _ROW_BYTES).contiguous()
    index = fill[:, None, None].expand(-1, _INDEX_LAYERS, _INDEX_PAGE_BYTES).contiguous()
    generations = torch.ones(1 + num_blocks, dtype=torch.int64)
    generations[0] = _EPOCH
    torch.cuda.synchronize()
    with KvExporter(f"prefill-{rank}", rows, index, generations) as exporter:
        calls.send(exporter.regions().SerializeToString())
        calls.poll(None)  # until the other end is closed


if __name__ == "__main__":
    report.write("handoff_vram", measure())
