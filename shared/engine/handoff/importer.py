"""Pulls KV from a prefill worker's ranks into decode's host tier over NIXL, and fails closed.

NIXL protects no memory: an old reference still reads. So every piece is checked against the owner's
epoch and block generations before the read and, in a transfer of its own, after it; only then are
rows copied out of the staging memory. Late reads can only reach staging, so the destination pages
are the caller's again once a pull has ended.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from shared import farspan_pb2 as pb
from shared.engine.handoff.peers import RankPeer
from shared.engine.handoff.pull_plan import Piece, pieces
from shared.engine.handoff.reader import BlockReader, RankShare, ReadCounts
from shared.engine.handoff.relayout import copy_page, index_fields, mla_fields, strips
from shared.engine.handoff.staging import Lane, Lanes, slots_per_lane
from shared.engine.kv.layout import BLOCK_TOKENS, IntArray, Sharding
from shared.errors import ConfigError, WorkerLost


class StaleRef(WorkerLost):
    """A block reference is dead: its worker restarted, or the block went to another request."""


@dataclass(frozen=True)
class Destination:
    """Where a sequence's pages go: page_ids[p] is the place of tokens [64 * p, 64 * p + 64)."""

    host_rows: torch.Tensor  # [num_mla_layers, num_pages, 64, row_bytes] uint8
    index_pages: torch.Tensor  # [num_index_layers, num_pages, index_page_bytes] uint8
    page_ids: Sequence[int]


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


@dataclass(eq=False)
class _Pull:
    """One pull under way, in its lane."""

    request: PullRequest
    sharding: Sharding
    peers: list[RankPeer]
    block_ids: IntArray  # [num effective blocks], of the chain up to last_token
    generations: npt.NDArray[np.uint64]  # of the same
    lane: Lane
    deadline: float  # monotonic
    counts: ReadCounts = field(default_factory=ReadCounts)

    @property
    def blocks_at_once(self) -> int:
        """Effective blocks that fit the lane."""
        return self.lane.num_slots // self.sharding.size


class KvImporter:
    """Decode's end. `pull` blocks and may run in several threads at once, one staging lane each."""

    def __init__(
        self,
        owner: str,
        layout: pb.KvLayout,  # the receiver's; only the shapes of its pages count here
        *,
        staging_bytes: int,
        num_lanes: int = 4,
    ) -> None:
        lane_slots = slots_per_lane(layout, staging_bytes, num_lanes)
        self._lanes = Lanes(num_lanes, lane_slots)
        self._reader = BlockReader(owner, layout, num_lanes * lane_slots)
        self._mla_fields = mla_fields(layout.row_bytes)
        self._index_fields = index_fields(layout.kv_format, layout.index_page_bytes)

    @property
    def counts(self) -> ReadCounts:
        """What all pulls since the start have read, failed ones included."""
        return self._reader.counts

    @property
    def num_quarantined_lanes(self) -> int:
        """Lanes out of use until a read that timed out is known to be over; asking polls them."""
        return self._lanes.num_quarantined

    def pull(self, request: PullRequest) -> ReadCounts:
        """Copy the requested tokens into their pages: complete and current when this returns.

        Raises StaleRef for dead references, WorkerLost when a rank is gone or too slow, Overloaded
        when all lanes are taken until the deadline. After an error the pages hold nothing of value,
        and nothing writes them.
        """
        deadline = time.monotonic() + request.deadline_s
        sharding = Sharding(len(request.ranks), request.interleave)
        block_ids, generations = _parse_refs(request, sharding)
        peers = [self._reader.peers.find(regions) for regions in request.ranks]
        with self._lanes.borrow(deadline) as lane:
            pull = _Pull(request, sharding, peers, block_ids, generations, lane, deadline)
            if pull.blocks_at_once == 0:
                raise ConfigError(
                    f"a staging lane of {lane.num_slots} slots cannot hold a block of"
                    f" {sharding.size} ranks"
                )
            for piece in pieces(
                request.first_token, request.last_token, sharding, pull.blocks_at_once
            ):
                self._fetch(pull, piece)
                self._place(pull, piece)
        return pull.counts

    def _fetch(self, pull: _Pull, piece: Piece) -> None:
        shares = _shares(pull, piece)
        self._verify(pull, piece, shares)
        pull.counts += self._reader.read_blocks(pull.lane, shares, pull.deadline)
        self._verify(pull, piece, shares)

    def _verify(self, pull: _Pull, piece: Piece, shares: list[RankShare]) -> None:
        pull.counts += self._reader.read_words(pull.lane, shares, pull.deadline)
        slots = self._reader.slots
        for share, blocks in zip(shares, filter(None, piece.blocks_of_rank), strict=True):
            name = share.peer.regions.agent_name
            if slots.epochs[share.epoch_slot].item() != pull.request.epoch:
                raise StaleRef(f"{name} is in another epoch")
            found = slots.generations.numpy()[share.slots].view(np.uint64)
            if not np.array_equal(found, pull.generations[list(blocks)]):
                raise StaleRef(f"{name} has given a block to another request")

    def _place(self, pull: _Pull, piece: Piece) -> None:
        shape = (pull.sharding.size, pull.blocks_at_once)
        used = slice(pull.lane.first_slot, pull.lane.first_slot + shape[0] * shape[1])
        mla = self._reader.slots.mla[used].unflatten(0, shape)  # [W, blocks, layers, page bytes]
        index = self._reader.slots.index[used].unflatten(0, shape)
        destination = pull.request.destination
        for page in range(piece.first_token // BLOCK_TOKENS, -(-piece.last_token // BLOCK_TOKENS)):
            num_tokens = min(BLOCK_TOKENS, piece.last_token - page * BLOCK_TOKENS)
            parts = list(strips(page, num_tokens, pull.sharding))
            block = page // pull.sharding.size - piece.first_block
            page_id = destination.page_ids[page]
            rows = destination.host_rows[:, page_id].flatten(1)
            keys = destination.index_pages[:, page_id]
            copy_page(mla[:, block], rows, parts, self._mla_fields, pull.sharding)
            copy_page(index[:, block], keys, parts, self._index_fields, pull.sharding)


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
                block_ids=pull.block_ids[numbers],
                slots=first_slot + numbers - piece.first_block,
                epoch_slot=pull.lane.first_slot + rank,
            )
        )
    return shares


def _parse_refs(
    request: PullRequest, sharding: Sharding
) -> tuple[IntArray, npt.NDArray[np.uint64]]:
    assert 0 <= request.first_token < request.last_token
    assert request.first_token % BLOCK_TOKENS == 0
    num_blocks = -(-request.last_token // sharding.effective_block_tokens)
    refs = request.blocks[:num_blocks]
    if len(refs) < num_blocks:
        raise StaleRef(f"{len(refs)} blocks are offered where {num_blocks} are needed")
    block_ids = np.array([ref.block_id for ref in refs], np.int64)
    generations = np.array([ref.generation for ref in refs], np.uint64)
    pool_blocks = min(regions.num_blocks for regions in request.ranks)
    if block_ids.max() >= pool_blocks or generations.min() == 0:
        raise StaleRef(f"a reference names no block of a pool of {pool_blocks}")
    return block_ids, generations
