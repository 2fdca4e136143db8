"""Pulls KV from a prefill worker's ranks into decode's host tier over NIXL, and fails closed.

NIXL protects no memory: an old reference still reads. So every piece is checked against the owner's
epoch and block generations before the read and, in a transfer of its own, after it; only then are
rows copied out of the staging memory. Late reads can only reach staging, so the destination pages
are the caller's again once a pull has ended.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from shared import farspan_pb2 as pb
from shared.engine.handoff.agent import NixlAgent
from shared.engine.handoff.peers import RankPeer, RankPeers
from shared.engine.handoff.placing import CpuPlacer, Destination, Placer, Staged
from shared.engine.handoff.pull_plan import Piece, pieces
from shared.engine.handoff.reader import BlockReader, RankShare, ReadCounts
from shared.engine.handoff.staging import Lane, Lanes, Slots, allocate_slots, slots_per_lane
from shared.engine.kv.layout import BLOCK_TOKENS, IntArray, Sharding
from shared.errors import ConfigError, WorkerLost

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class StaleRef(WorkerLost):
    """A block reference is dead: its worker restarted, or the block went to another request."""


@dataclass(frozen=True)
class PullRequest:
    """Tokens [first_token, last_token) of one offer; first_token begins a page."""

    ranks: Sequence[pb.RankRegions]  # W of them
    blocks: Sequence[pb.BlockRef]  # the offer's whole chain
    epoch: int
    interleave: int
    first_token: int
    last_token: int
    deadline_s: float
    destination: Destination


@dataclass(frozen=True)
class _Refs:
    """The references of the effective blocks that a pull needs, first_block onwards."""

    first_block: int
    block_ids: IntArray
    generations: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class _Staging:
    """Memory of one kind for reads to land in."""

    reader: BlockReader
    lanes: Lanes


@dataclass(eq=False)
class _Pull:
    """One pull under way, in its lane."""

    request: PullRequest
    sharding: Sharding
    peers: list[RankPeer]
    refs: _Refs
    reader: BlockReader
    lane: Lane
    deadline: float  # monotonic
    counts: ReadCounts = field(default_factory=ReadCounts)

    @property
    def blocks_at_once(self) -> int:
        """Effective blocks that fit the lane."""
        return self.lane.num_slots // self.sharding.size


class KvImporter:
    """Decode's end. `pull` blocks and may run in several threads at once, one staging lane each.

    A worker on a GPU has staging memory of both kinds: blocks land in the memory of the kind they
    come from, since NIXL crosses between them at less than 1 GB/s where there is no RDMA.
    """

    def __init__(
        self,
        owner: str,
        layout: pb.KvLayout,  # the receiver's; only the shapes of its pages count here
        *,
        staging_bytes: int,  # of each kind of memory
        num_lanes: int = 4,
        device: torch.device = _CPU,  # where index pages lie; host rows are pinned for a GPU
    ) -> None:
        lane_slots = slots_per_lane(layout, staging_bytes, num_lanes)
        self.reads_gpu_memory = torch.cuda.is_available()
        self._device = device
        self._enter_device()
        agent = NixlAgent(owner)

        def staging(slots: Slots) -> _Staging:
            return _Staging(BlockReader(agent, slots), Lanes(num_lanes, lane_slots))

        num_slots, is_on_gpu = num_lanes * lane_slots, device.type == "cuda"
        in_host = staging(allocate_slots(layout, num_slots, pin_memory=is_on_gpu))
        self._stagings = {"DRAM": in_host, "VRAM": in_host}
        self._placer: Placer = CpuPlacer(layout)
        if is_on_gpu:
            from shared.engine.handoff.gpu_placing import GpuPlacer  # loads Triton

            self._stagings["VRAM"] = staging(allocate_slots(layout, num_slots, device))
            self._placer = GpuPlacer(device, layout, lane_slots, num_lanes)
        slots = in_host.reader.slots
        self._peers = RankPeers(agent, slots.mla[0].nbytes, slots.index[0].nbytes)
        self._has_warned = False

    @property
    def counts(self) -> ReadCounts:
        """What all pulls since the start have read, failed ones included."""
        return sum((each.reader.counts for each in self._all_stagings()), ReadCounts())

    @property
    def num_quarantined_lanes(self) -> int:
        """Lanes out of use until a read that timed out is known to be over; asking polls them."""
        return sum(each.lanes.num_quarantined for each in self._all_stagings())

    def pull(self, request: PullRequest) -> ReadCounts:
        """Copy the requested tokens into their pages: complete and current when this returns.

        Raises StaleRef for dead references, WorkerLost when a rank is gone or too slow, Overloaded
        when all lanes are taken until the deadline. After an error the pages hold nothing of value,
        and nothing writes them.
        """
        deadline = time.monotonic() + request.deadline_s
        self._enter_device()
        sharding = Sharding(len(request.ranks), request.interleave)
        refs = _parse_refs(request, sharding)
        with ExitStack() as stack:
            peers = stack.enter_context(self._peers.borrow(request.ranks))
            staging = self._staging_for(peers)
            lane = stack.enter_context(staging.lanes.borrow(deadline))
            pull = _Pull(request, sharding, peers, refs, staging.reader, lane, deadline)
            if pull.blocks_at_once == 0:
                raise ConfigError(
                    f"a staging lane of {lane.num_slots} slots cannot hold a block of"
                    f" {sharding.size} ranks"
                )
            for piece in pieces(
                request.first_token, request.last_token, sharding, pull.blocks_at_once
            ):
                _fetch(pull, piece)
                self._placer.place(_staged(pull, piece), request.destination)
        return pull.counts

    def give_back_dead_memory(self) -> None:
        """Unmap GPU memory of ranks that have died; to be called now and then, by one thread.

        Until then the driver keeps it, and a restarted rank may find no room.
        """
        self._enter_device()
        dead = self._peers.find_dead()
        if dead and not self.num_quarantined_lanes:  # a read that was given up may be of theirs
            self._peers.unmap(dead)

    def _enter_device(self) -> None:
        """Make it this thread's current one, which is what UCX and launches go by."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _all_stagings(self) -> set[_Staging]:
        return set(self._stagings.values())

    def _staging_for(self, peers: Sequence[RankPeer]) -> _Staging:
        kinds = {peer.place.kind for peer in peers}
        if len(kinds) > 1:
            raise WorkerLost("the ranks of one worker keep their KV in different kinds of memory")
        (kind,) = kinds
        if kind == "VRAM" and self._device.type == "cpu" and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "KV is pulled out of GPUs into host memory: without RDMA NIXL does less than 1 GB/s"
            )
        return self._stagings[kind]


def _fetch(pull: _Pull, piece: Piece) -> None:
    shares = _shares(pull, piece)
    _verify(pull, piece, shares)
    pull.counts += pull.reader.read_blocks(pull.lane, shares, pull.deadline)
    _verify(pull, piece, shares)


def _verify(pull: _Pull, piece: Piece, shares: list[RankShare]) -> None:
    pull.counts += pull.reader.read_words(pull.lane, shares, pull.deadline)
    slots = pull.reader.slots
    for share, blocks in zip(shares, filter(None, piece.blocks_of_rank), strict=True):
        name = share.peer.regions.agent_name
        if slots.epochs[share.epoch_slot].item() != pull.request.epoch:
            raise StaleRef(f"{name} is in another epoch")
        found = slots.generations.numpy()[share.slots].view(np.uint64)
        expected = pull.refs.generations[np.array(blocks) - pull.refs.first_block]
        if not np.array_equal(found, expected):
            raise StaleRef(f"{name} has given a block to another request")


def _staged(pull: _Pull, piece: Piece) -> Staged:
    shape = (pull.sharding.size, pull.blocks_at_once)
    used = slice(pull.lane.first_slot, pull.lane.first_slot + shape[0] * shape[1])
    slots = pull.reader.slots
    return Staged(
        piece,
        pull.sharding,
        slots.mla[used].unflatten(0, shape),
        slots.index[used].unflatten(0, shape),
    )


def _shares(pull: _Pull, piece: Piece) -> list[RankShare]:
    shares = []
    for rank, blocks in enumerate(piece.blocks_of_rank):
        if not blocks:
            continue
        numbers = np.array(blocks, np.int64)
        first_slot = pull.lane.first_slot + rank * pull.blocks_at_once
        shares.append(
            RankShare(
                peer=pull.peers[rank],
                block_ids=pull.refs.block_ids[numbers - pull.refs.first_block],
                slots=first_slot + numbers - piece.first_block,
                epoch_slot=pull.lane.first_slot + rank,
            )
        )
    return shares


def _parse_refs(request: PullRequest, sharding: Sharding) -> _Refs:
    assert 0 <= request.first_token < request.last_token
    assert request.first_token % BLOCK_TOKENS == 0
    num_blocks = -(-request.last_token // sharding.effective_block_tokens)
    if len(request.blocks) < num_blocks:
        raise StaleRef(f"{len(request.blocks)} blocks are offered where {num_blocks} are needed")
    # A long prompt comes in hundreds of pulls: each looks at its own part of the chain only.
    first_block = request.first_token // sharding.effective_block_tokens
    refs = request.blocks[first_block:num_blocks]
    block_ids = np.array([ref.block_id for ref in refs], np.int64)
    generations = np.array([ref.generation for ref in refs], np.uint64)
    pool_blocks = min(regions.num_blocks for regions in request.ranks)
    if block_ids.max() >= pool_blocks or generations.min() == 0:
        raise StaleRef(f"a reference names no block of a pool of {pool_blocks}")
    return _Refs(first_block, block_ids, generations)
