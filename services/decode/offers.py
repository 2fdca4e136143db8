"""Whether an offer can be served here at all: identity, layout, lengths, time.

Pure. Everything that arrives with an offer is checked here and trusted afterwards; whether there
is room now is the scheduler's question.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.decode.answer import longest_answer
from shared import farspan_pb2 as pb
from shared import sampling
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES, token_ids
from shared.errors import BadRequest, DeadlineExceeded, TooLong, WorkerLost
from shared.grammar import Vocabulary
from shared.layout_key import LayoutKey


@dataclass(frozen=True)
class Terms:
    """What this worker is and can take."""

    worker: pb.WorkerRef
    layout: pb.KvLayout
    vocabulary: Vocabulary
    max_position: int
    reads_gpu_memory: bool


def check(offer: pb.HandoffOffer, terms: Terms, now_unix_ms: float) -> None:
    """Raise what refuses the offer: BadRequest, TooLong, DeadlineExceeded, or WorkerLost when
    another worker would do.
    """
    if offer.decode != terms.worker:
        raise WorkerLost(f"{terms.worker.worker_id} has begun another life")
    if not (offer.request_id and offer.gateway_id and offer.prefill.epoch and offer.lease_ms):
        raise BadRequest("an offer needs a request, a gateway, a prefill worker and a lease")
    _check_layout(offer.layout, terms.layout)
    num_tokens = _check_tokens(offer, terms.vocabulary.size)
    _check_blocks(offer, num_tokens)
    _check_ranks(offer.ranks, terms)
    sampling.check(offer.sampling, terms.vocabulary.size)
    if longest_answer(offer.sampling, num_tokens, terms.max_position) < 1:
        raise TooLong(f"{num_tokens} tokens leave no room within {terms.max_position} positions")
    if offer.deadline_unix_ms <= now_unix_ms:
        raise DeadlineExceeded("the request's deadline had passed before it was offered")


def _check_layout(offered: pb.KvLayout, own: pb.KvLayout) -> None:
    for name in LayoutKey._fields:
        if getattr(offered, name) != getattr(own, name):
            raise WorkerLost(
                f"KV with {name}={getattr(offered, name)} cannot be used where it is"
                f" {getattr(own, name)}"
            )
    if not offered.interleave or BLOCK_TOKENS % offered.interleave:
        raise BadRequest(f"no layout has interleave {offered.interleave}")


def _check_tokens(offer: pb.HandoffOffer, vocab_size: int) -> int:
    try:
        ids = token_ids(offer.token_ids)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if not ids or max(ids) >= vocab_size:
        raise BadRequest(f"an offer needs tokens of the vocabulary of {vocab_size}")
    if offer.num_resumed_tokens >= len(ids):
        raise BadRequest("an offer needs a prompt before its resumed tokens")
    return len(ids)


def _check_ranks(ranks: Sequence[pb.RankRegions], terms: Terms) -> None:
    if len({rank.agent_name for rank in ranks}) != len(ranks):
        raise BadRequest("a rank is offered twice")
    kinds = {rank.memory_kind for rank in ranks}
    if kinds == {"VRAM"} and not terms.reads_gpu_memory:
        raise WorkerLost("the KV lies in GPU memory, which cannot be read where there is no CUDA")
    if kinds not in ({"VRAM"}, {"DRAM"}):
        raise BadRequest(f"KV in memory of the kinds {sorted(kinds)} cannot be read")


def _check_blocks(offer: pb.HandoffOffer, num_tokens: int) -> None:
    num_ranks = offer.layout.dcp_size
    if not num_ranks or len(offer.ranks) != num_ranks:
        raise BadRequest(f"{len(offer.ranks)} ranks are offered, the layout has {num_ranks}")
    num_blocks = -(-num_tokens // (BLOCK_TOKENS * num_ranks))
    if len(offer.blocks) != num_blocks:
        raise BadRequest(f"{len(offer.blocks)} blocks are offered, {num_blocks} are needed")
    if len(offer.block_hashes) != num_tokens // BLOCK_TOKENS * HASH_BYTES:
        raise BadRequest("an offer needs one hash for each full block")
    if len(offer.hash_root) != HASH_BYTES:
        raise BadRequest("an offer needs the root of its block hashes")
