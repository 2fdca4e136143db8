"""A decision as a record that says why, and from which the policy comes to the same choice again.

Pure: plain data to messages and back. Prompt content is not in it: of the block hashes, which the
policy does not read, only a digest.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.router import policy
from services.router.policy import Judgement, Score
from services.router.promises import reservation
from services.router.view import Hit, Hits, Promised, Rates, Worker, key_of
from shared import farspan_pb2 as pb
from shared.block_hash import HASH_BYTES


@dataclass(frozen=True)
class Inputs:
    """All that the policy saw."""

    request: pb.PlaceRequest  # without block hashes
    prefix_digest: bytes
    workers: Sequence[Worker]
    hits: Hits
    rates: Rates
    lifetime_s: float


def without_hashes(request: pb.PlaceRequest) -> tuple[pb.PlaceRequest, bytes]:
    """The request as it is kept, and the digest of its block hashes."""
    bare = pb.PlaceRequest()
    bare.CopyFrom(request)
    bare.ClearField("block_hashes")
    return bare, hashlib.blake2b(request.block_hashes, digest_size=HASH_BYTES).digest()


def judge(seen: Inputs) -> Judgement:
    """The policy's judgement on what was seen."""
    return policy.judge(seen.request, seen.workers, seen.hits, seen.rates, seen.lifetime_s)


def record(
    router_id: str, decided_unix_ms: int, seen: Inputs, judgement: Judgement
) -> pb.DecisionRecord:
    """The message that keeps both."""
    return pb.DecisionRecord(
        router_id=router_id,
        decided_unix_ms=decided_unix_ms,
        inputs=_inputs_message(seen),
        outcome=_outcome(judgement),
    )


def replay(stored: pb.DecisionRecord) -> pb.DecisionOutcome:
    """What the policy says today about the inputs of then."""
    return _outcome(judge(_inputs(stored.inputs)))


def first_difference(stored: pb.DecisionOutcome, replayed: pb.DecisionOutcome) -> str:
    """The first field in which two outcomes differ, bit for bit; empty if there is none."""
    if stored.SerializeToString(deterministic=True) == replayed.SerializeToString(
        deterministic=True
    ):
        return ""
    return _difference("", stored, replayed) or "the stored outcome has fields unknown here"


def _difference(path: str, left: object, right: object) -> str:
    if isinstance(left, pb.DecisionOutcome | pb.Placement | pb.Failure | pb.Reservation | pb.Score):
        for descriptor in left.DESCRIPTOR.fields:
            name = descriptor.name
            found = _difference(f"{path}.{name}", getattr(left, name), getattr(right, name))
            if found:
                return found
        return ""
    if isinstance(left, Sequence) and not isinstance(left, str | bytes):
        assert isinstance(right, Sequence)
        for place, (one, other) in enumerate(zip(left, right, strict=False)):
            found = _difference(f"{path}[{place}]", one, other)
            if found:
                return found
        return "" if len(left) == len(right) else f"{path[1:]}: {len(left)}, then {len(right)}"
    return "" if left == right else f"{path[1:]}: {_word(left)}, then {_word(right)}"


def _word(value: object) -> str:
    return repr(value) if not hasattr(value, "DESCRIPTOR") else " ".join(str(value).split())


def _inputs_message(seen: Inputs) -> pb.DecisionInputs:
    """Filled field by field: every decision pays for it, and constructors take much longer."""
    message = pb.DecisionInputs(
        request=seen.request,
        prefix_digest=seen.prefix_digest,
        rates={name: float(value) for name, value in vars(seen.rates).items()},
        lifetime_s=seen.lifetime_s,
    )
    for worker in seen.workers:
        view, promised = message.workers.add(), worker.promised
        view.heartbeat.CopyFrom(worker.heartbeat)
        for name in _PROMISED:
            setattr(view.promised, name, getattr(promised, name))
    for key, hit in sorted(seen.hits.items()):
        kept = message.hits.add()
        kept.worker.worker_id, kept.worker.epoch = key
        kept.num_blocks, kept.tier, kept.is_on_the_way = hit
    return message


def _inputs(message: pb.DecisionInputs) -> Inputs:
    workers = [
        Worker(
            view.heartbeat,
            Promised(**{name: getattr(view.promised, name) for name in _PROMISED}),
        )
        for view in message.workers
    ]
    hits = {
        key_of(hit.worker): Hit(hit.num_blocks, hit.tier, hit.is_on_the_way) for hit in message.hits
    }
    return Inputs(
        message.request,
        message.prefix_digest,
        workers,
        hits,
        _rates(message.rates),
        message.lifetime_s,
    )


_PROMISED = tuple(field.name for field in dataclasses.fields(Promised))


def _rates(stored: Mapping[str, float]) -> Rates:
    """A rate that is whole in the code is whole again; what the code has dropped is left out."""
    defaults = dataclasses.asdict(Rates())
    known = {
        name: type(defaults[name])(value) for name, value in stored.items() if name in defaults
    }
    return Rates(**known)


def _outcome(judgement: Judgement) -> pb.DecisionOutcome:
    scores = [_score(score) for score in judgement.scores]
    decision, refusal = judgement.decision, judgement.refusal
    if decision is not None:
        taken = reservation(decision, lifetime_s=0)
        return pb.DecisionOutcome(placement=decision.placement, reservation=taken, scores=scores)
    assert refusal is not None, "a judgement without an outcome"
    return pb.DecisionOutcome(failure=refusal.as_failure(), scores=scores)


def _score(score: Score) -> pb.Score:
    heartbeat, bid = score.worker.heartbeat, score.bid
    message = pb.Score(worker=heartbeat.worker, role=heartbeat.role, left_out=score.left_out)
    if bid is not None:
        message.must_wait = bid.must_wait
        message.cost_s = bid.cost_s
        message.hit_tokens = bid.hit_tokens
        message.figures = bid.figures
    return message
