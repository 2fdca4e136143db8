"""Workers' messages about blocks, parsed: what may not be empty or unknown is refused here.

Knows the wire and tier bits; keeps no state.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash, unpack
from shared.errors import BadRequest

GONE = 0  # the tier bits of a block that is held nowhere
DEVICE_BIT = 1
HOST_BIT = 2
_TIER_BITS: dict[int, int] = {pb.TIER_DEVICE: DEVICE_BIT, pb.TIER_HOST: HOST_BIT}
_ALL_BITS = DEVICE_BIT | HOST_BIT


class Life(NamedTuple):
    """One life of one worker: a restart keeps the id and raises the epoch."""

    worker_id: str
    epoch: int


class Change(NamedTuple):
    """One event: every named block keeps `keep_bits` of its tiers and gains `set_bits`."""

    hashes: Sequence[BlockHash]
    set_bits: int
    keep_bits: int


class Cleared(NamedTuple):
    """One event: the worker holds nothing any more."""


def life_of(worker: pb.WorkerRef) -> Life:
    """The life a message speaks of. Raises BadRequest if it names none."""
    if not worker.worker_id or not worker.epoch:
        raise BadRequest("a worker reference needs an id and an epoch")
    return Life(worker.worker_id, worker.epoch)


def changes(batch: pb.BlockEvents) -> list[Change | Cleared]:
    """The events of a batch, in order. Raises BadRequest if one of them is not understood."""
    return [_change(event) for event in batch.events]


def snapshot_blocks(snapshot: pb.BlockSnapshot) -> dict[BlockHash, int]:
    """The tier bits of every block of a snapshot. Raises BadRequest."""
    blocks = dict.fromkeys(parse_hashes(snapshot.host_block_hashes), HOST_BIT)
    for block_hash in parse_hashes(snapshot.device_block_hashes):
        blocks[block_hash] = blocks.get(block_hash, GONE) | DEVICE_BIT
    return blocks


def parse_hashes(data: bytes) -> list[BlockHash]:
    """The hashes of a message's field. Raises BadRequest if it holds a part of one."""
    try:
        return unpack(data)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _change(event: pb.BlockEvent) -> Change | Cleared:
    match event.WhichOneof("event"):
        case "stored":
            bit = _tier_bit(event.stored.tier)
            return Change(parse_hashes(event.stored.block_hashes), bit, _ALL_BITS)
        case "removed":
            bit = _tier_bit(event.removed.tier)
            return Change(parse_hashes(event.removed.block_hashes), GONE, _ALL_BITS & ~bit)
        case "cleared":
            return Cleared()
        case _:
            # Skipping it would leave a wrong index that looks right.
            raise BadRequest("a block event of a kind this version does not know")


def _tier_bit(tier: int) -> int:
    bit = _TIER_BITS.get(tier)
    if bit is None:
        raise BadRequest(f"tier {tier} does not exist")
    return bit
