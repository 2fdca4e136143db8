"""Workers' messages about blocks, parsed: what is empty, unknown or sparse is refused here.

Knows the wire and tier bits; keeps no state.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES
from shared.errors import BadRequest

DEVICE_BIT = 1
HOST_BIT = 2
TIER_BITS = (DEVICE_BIT, HOST_BIT)
_MAX_AHEAD_NS = 86_400 * 10**9  # clocks differ; time zones are the largest honest mistake
_BITS: dict[int, int] = {pb.TIER_DEVICE: DEVICE_BIT, pb.TIER_HOST: HOST_BIT}


class Life(NamedTuple):
    """One life of one worker: a restart keeps the id and raises the epoch."""

    worker_id: str
    epoch: int


class End(StrEnum):
    """Why a life is no longer followed."""

    SILENT = "silent"  # it may return
    STOPPED = "stopped"  # it said so
    REFUSED = "refused"  # it said something that is not understood


class Change(NamedTuple):
    """One event: these blocks have come to a tier, or left it."""

    tier_bit: int
    is_stored: bool
    packed: bytes  # 16 bytes a block


class Cleared(NamedTuple):
    """One event: the worker holds nothing any more."""


def life_of(worker: pb.WorkerRef) -> Life:
    """The life a message speaks of. Raises BadRequest if it names none."""
    if not worker.worker_id or not worker.epoch:
        raise BadRequest("a worker reference needs an id and an epoch")
    return Life(worker.worker_id, worker.epoch)


def is_ahead(life: Life, now_ns: int) -> bool:
    """Whether a life begins so far in the future that its epoch cannot be one.

    Who believed it would hear nothing of the worker's true lives any more.
    """
    return life.epoch > now_ns + _MAX_AHEAD_NS


def changes(batch: pb.BlockEvents) -> list[Change | Cleared]:
    """The events of a batch, in order. Raises BadRequest if one of them is not understood."""
    return [_change(event) for event in batch.events]


def snapshot_changes(snapshot: pb.BlockSnapshot) -> list[Change]:
    """A snapshot as the events that lead to it from nothing. Raises BadRequest."""
    return [
        Change(DEVICE_BIT, True, whole(snapshot.device_block_hashes)),
        Change(HOST_BIT, True, whole(snapshot.host_block_hashes)),
    ]


def whole(packed: bytes) -> bytes:
    """These hashes. Raises BadRequest if there is a part of one."""
    if len(packed) % HASH_BYTES:
        raise BadRequest(f"{len(packed)} bytes of block hashes are not a multiple of {HASH_BYTES}")
    return packed


def blocks(changes: Iterable[Change]) -> dict[bytes, int]:
    """The tier bits that changes leave to every block they name, 0 where it left its last tier."""
    bits: dict[bytes, int] = {}
    for tier_bit, is_stored, packed in changes:
        for at in range(0, len(packed), HASH_BYTES):
            block_hash = packed[at : at + HASH_BYTES]
            before = bits.get(block_hash, 0)
            bits[block_hash] = before | tier_bit if is_stored else before & ~tier_bit
    return bits


def check_layout(layout: pb.KvLayout) -> None:
    """Raises BadRequest if a worker counts in blocks of another size: its hashes mean others."""
    if layout.block_tokens != BLOCK_TOKENS:
        raise BadRequest(f"its blocks have {layout.block_tokens} tokens, not {BLOCK_TOKENS}")


def _change(event: pb.BlockEvent) -> Change | Cleared:
    match event.WhichOneof("event"):
        case "stored":
            change = Change(_bit(event.stored.tier), True, whole(event.stored.block_hashes))
            num_tokens = len(change.packed) // HASH_BYTES * BLOCK_TOKENS
            if event.stored.num_tokens != num_tokens:
                raise BadRequest(f"hashes of {num_tokens} tokens for {event.stored.num_tokens}")
            return change
        case "removed":
            return Change(_bit(event.removed.tier), False, whole(event.removed.block_hashes))
        case "cleared":
            return Cleared()
        case _:
            # Skipping it would leave a wrong index that looks right.
            raise BadRequest("a block event of a kind this version does not know")


def _bit(tier: int) -> int:
    bit = _BITS.get(tier)
    if bit is None:
        raise BadRequest(f"tier {tier} does not exist")
    return bit
