"""Processes that hold KV, for the transfer tests: what they hold, and how to command them.

Contents are a formula of (seed, token, layer, byte) below 251, so that both ends know them;
everything else in a pool is 255 and in a destination 254. Pools are filled token by token from the
ownership formula.
"""

import ctypes
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from shared import farspan_pb2 as pb
from shared.engine.handoff.exporter import KvExporter
from shared.engine.handoff.importer import KvImporter, PullRequest, StaleRef
from shared.engine.handoff.placing import Destination

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2
_CALL_S = 60.0  # a first call waits for the child to import torch on a busy machine


@dataclass(frozen=True)
class Held:
    """A sequence in the pools of W ranks."""

    size: int
    interleave: int
    kv_format: str = "fp8_ds_mla"
    num_tokens: int = 300
    seed: int = 0
    epoch: int = 1_700_000_000_000_000_000
    num_blocks: int = 12  # of each rank's pool
    num_mla_layers: int = 3
    num_index_layers: int = 2
    row_bytes: int = 48
    key_bytes: int = 16

    @property
    def scale_bytes(self) -> int:
        return 4 if self.kv_format == "fp8_ds_mla" else 0

    @property
    def layout(self) -> pb.KvLayout:
        return pb.KvLayout(
            kv_format=self.kv_format,
            block_tokens=64,
            dcp_size=self.size,
            interleave=self.interleave,
            num_mla_layers=self.num_mla_layers,
            num_index_layers=self.num_index_layers,
            row_bytes=self.row_bytes,
            index_page_bytes=64 * (self.key_bytes + self.scale_bytes),
        )

    @property
    def blocks(self) -> list[pb.BlockRef]:
        """The chain, in an order that is neither sorted nor without gaps."""
        count = -(-self.num_tokens // (64 * self.size))
        ids = [(7 * i + 3) % self.num_blocks for i in range(count)]
        assert len(set(ids)) == count
        return [pb.BlockRef(block_id=i, generation=5 + i) for i in ids]

    def rows(self) -> torch.Tensor:
        """[num_mla_layers, num_tokens, row_bytes] uint8."""
        return self._pattern(self.num_mla_layers, self.row_bytes, salt=self.seed)

    def keys(self) -> torch.Tensor:
        """[num_index_layers, num_tokens, key_bytes + scale_bytes] uint8."""
        return self._pattern(
            self.num_index_layers, self.key_bytes + self.scale_bytes, salt=self.seed + 100
        )

    def _pattern(self, num_layers: int, width: int, salt: int) -> torch.Tensor:
        layer = torch.arange(num_layers, dtype=torch.int32).view(-1, 1, 1) * 17
        token = torch.arange(self.num_tokens, dtype=torch.int32).view(1, -1, 1)
        byte = torch.arange(width, dtype=torch.int32) * 3
        mixed = token * 31 + token // 64 * 7 + token // 251 * 5 + layer + byte + salt * 11
        return (mixed % 251).to(torch.uint8)

    def write_key(self, page: torch.Tensor, row: int, key: torch.Tensor) -> None:
        """Put keys of all layers in a row of an index page [num_index_layers, page_bytes]."""
        width = self.key_bytes
        page[:, row * width : (row + 1) * width] = key[:, :width]
        if self.scale_bytes:
            at = 64 * width + row * self.scale_bytes
            page[:, at : at + self.scale_bytes] = key[:, width:]

    def pools(self, rank: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the rank registers: latent pool, index pool, generation table."""
        mla_shape = (self.num_blocks, self.num_mla_layers, 64, self.row_bytes)
        index_shape = (self.num_blocks, self.num_index_layers, self.layout.index_page_bytes)
        mla = torch.full(mla_shape, 255, dtype=torch.uint8)
        index = torch.full(index_shape, 255, dtype=torch.uint8)
        rows, keys, blocks = self.rows(), self.keys(), self.blocks
        for token in range(self.num_tokens):
            if token // self.interleave % self.size == rank:
                stride = self.size * self.interleave
                local = token // stride * self.interleave + token % self.interleave
                block = blocks[local // 64].block_id
                mla[block, :, local % 64] = rows[:, token]
                self.write_key(index[block], local % 64, keys[:, token])
        table = torch.zeros(1 + self.num_blocks, dtype=torch.int64)
        table[0] = self.epoch
        for ref in blocks:
            table[1 + ref.block_id] = ref.generation
        return mla.to(device), index.to(device), table


@dataclass
class Pages:
    """A destination that keeps the pages in reverse, and what should be in it after a pull."""

    held: Held
    device: str = "cpu"  # decode's
    num_pages: int = field(init=False)
    destination: Destination = field(init=False)

    def __post_init__(self) -> None:
        self.num_pages = -(-self.held.num_tokens // 64) + 2
        filled = self._filled_with_254()
        if self.device != "cpu":
            rows, pages = filled.host_rows.pin_memory(), filled.index_pages.to(self.device)
            filled = replace(filled, host_rows=rows, index_pages=pages)
        self.destination = filled

    def _filled_with_254(self) -> Destination:
        held = self.held
        rows = (held.num_mla_layers, self.num_pages, 64, held.row_bytes)
        pages = (held.num_index_layers, self.num_pages, held.layout.index_page_bytes)
        return Destination(
            host_rows=torch.full(rows, 254, dtype=torch.uint8),
            index_pages=torch.full(pages, 254, dtype=torch.uint8),
            page_ids=list(range(self.num_pages - 2, 0, -1)),
        )

    def request(self, ranks: list[pb.RankRegions], **changes: Any) -> PullRequest:
        """The pull of the whole sequence, or as changed."""
        whole = PullRequest(
            ranks=ranks,
            blocks=self.held.blocks,
            epoch=self.held.epoch,
            interleave=self.held.interleave,
            first_token=0,
            last_token=self.held.num_tokens,
            deadline_s=20.0,
            destination=self.destination,
        )
        return replace(whole, **changes)

    def holds(self, first_token: int, last_token: int) -> bool:
        """Whether tokens [first_token, last_token) are in place and nothing else is written."""
        expected = self._filled_with_254()
        rows, keys = self.held.rows(), self.held.keys()
        for token in range(first_token, last_token):
            page = expected.page_ids[token // 64]
            expected.host_rows[:, page, token % 64] = rows[:, token]
            self.held.write_key(expected.index_pages[:, page], token % 64, keys[:, token])
        return torch.equal(expected.host_rows, self.destination.host_rows) and torch.equal(
            expected.index_pages, self.destination.index_pages.cpu()
        )


class Peer:
    """A process of its own with UCX settings of its own, and a network namespace if named."""

    def __init__(self, ucx: Mapping[str, str], network: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(ucx), network))
        self._process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of one of _Commands' methods."""
        self._calls.send((name, arguments))
        assert self._calls.poll(_CALL_S), f"the peer did not answer {name}"
        return self._calls.recv()

    def start(self, name: str, *arguments: Any) -> None:
        """Have it begin a command; returns when it has."""
        self._calls.send((name, arguments))
        assert self._calls.poll(_CALL_S), f"the peer did not begin {name}"
        assert self._calls.recv() == "begun"

    def export(self, held: Held, rank: int, device: str = "cpu") -> pb.RankRegions:
        """Regions of fresh pools; the peer's earlier pools are served no more."""
        return pb.RankRegions.FromString(self.ask("export", held, rank, device))

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal; after SIGKILL it is waited for."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.join(10)

    def close(self) -> None:
        """End the process, whatever its state."""
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self._calls.close()


def pull_while_it_changes(
    rank: Peer,
    importer: KvImporter,
    pages: Pages,
    regions: list[pb.RankRegions],
    *,
    wanted: int,
    within_s: float,
) -> tuple[int, int]:
    """Pull the first block of a rank that churns it, until so many pulls were accepted and refused.

    Whatever is accepted is whole, and as it was asked for.
    """
    block_id = pages.held.blocks[0].block_id
    page = pages.destination.host_rows[:, pages.destination.page_ids[0]]
    accepted = refused = 0
    until = time.monotonic() + within_s
    while (accepted < wanted or refused < wanted) and time.monotonic() < until:
        generation = rank.ask("offered")
        now = pb.BlockRef(block_id=block_id, generation=generation)
        try:
            importer.pull(pages.request(regions, blocks=[now]))
        except StaleRef:
            refused += 1
            continue
        accepted += 1
        assert page.min() == page.max() == generation % 251
    return accepted, refused


class _Commands:
    """What a peer does when asked."""

    def __init__(self, stack: ExitStack, calls: Connection) -> None:
        self._stack = stack
        self._calls = calls
        self._kept: list[Any] = []  # registered memory stays until the process ends
        self._table = torch.zeros(1, dtype=torch.int64)
        self._mla = torch.zeros(1)

    def export(self, held: Held, rank: int, device: str) -> bytes:
        self._stack.close()
        self._mla, index, self._table = pools = held.pools(rank, device)
        exporter = KvExporter(f"prefill-{rank}", self._mla, index, self._table)
        self._stack.enter_context(exporter)
        self._kept += [pools, exporter]
        return exporter.regions().SerializeToString()

    def set_word(self, word: int, value: int) -> None:
        self._table[word] = value

    def churn(self, block: int, longest_s: float = 0.03) -> None:
        """From now on give the block to another request again and again, its bytes being the
        generation's, each for longest_s at most. Returns when the first has been written.
        """
        churn = _Churn(self._table, self._mla, block, longest_s)
        self._stack.callback(churn.stopping.set)
        self._churn = churn
        threading.Thread(target=churn.run, daemon=True).start()
        churn.has_written.wait()

    def offered(self) -> int:
        """The newest generation of the churned block that an owner would offer."""
        return self._churn.written

    def pull(self, held: Held, ranks: list[bytes], last_token: int) -> bool:
        """Whether a pull of the first last_token tokens gives what they should be."""
        pages = Pages(held)
        importer = KvImporter("decode", held.layout, staging_bytes=1 << 20, num_lanes=1)
        regions = [pb.RankRegions.FromString(rank) for rank in ranks]
        importer.pull(pages.request(regions, last_token=last_token))
        return pages.holds(0, last_token)

    def pull_forever(self, held: Held, ranks: list[bytes]) -> None:
        """Pull the whole sequence again and again, until the process is killed."""
        pages = Pages(held)
        importer = KvImporter("decode", held.layout, staging_bytes=1 << 25, num_lanes=1)
        regions = [pb.RankRegions.FromString(rank) for rank in ranks]
        importer.pull(pages.request(regions))
        self._calls.send("begun")
        while True:
            importer.pull(pages.request(regions))


class _Churn:
    """An owner that reuses a block: it raises the generation, writes, and only then offers."""

    def __init__(
        self, table: torch.Tensor, mla: torch.Tensor, block: int, longest_s: float
    ) -> None:
        self._longest_s = longest_s
        self._word = table[1 + block :]
        self._page = mla[block]
        self.stopping = threading.Event()
        self.has_written = threading.Event()
        self.written = 0

    def run(self) -> None:
        hold_s = random.Random(0)
        while not self.stopping.is_set():
            generation = int(self._word[0]) + 1
            self._word[0] = generation
            self._page.fill_(generation % 251)
            if self._page.is_cuda:
                torch.cuda.synchronize(self._page.device)
            self.written = generation
            self.has_written.set()
            time.sleep(hold_s.uniform(0, self._longest_s))


def _serve(calls: Connection, ucx: dict[str, str], network: str | None) -> None:
    os.environ.update(ucx)
    torch.set_num_threads(1)
    if network is not None:
        _enter_network(network)
    with ExitStack() as stack:
        commands = _Commands(stack, calls)
        while True:
            try:
                name, arguments = calls.recv()
            except EOFError:
                return
            calls.send(getattr(commands, name)(*arguments))


def _enter_network(name: str) -> None:
    """Join a namespace made by `ip netns add`, with its own /sys, where UCX finds devices."""
    with Path(f"/run/netns/{name}").open() as namespace:
        _call("setns", namespace.fileno(), _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    _call("umount2", b"/sys", _MNT_DETACH)
    _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
