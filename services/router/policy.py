"""Chooses the workers of a request: pure, deterministic, the same code live and in a replay.

Knows heartbeats, promises and prefix hits; knows no clock, no NATS, no text. Workers that can never
hold the request are left out; the others are compared by the time it would take there.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from services.router import cost
from services.router.cost import Bid
from services.router.view import Hit, Hits, Rates, Worker, WorkerKey, key_of
from shared import farspan_pb2 as pb
from shared.errors import Overloaded, TooLong

_ROLE_NAMES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}
_Price = Callable[[pb.PlaceRequest, Worker, Hit | None, Rates], Bid]


@dataclass(frozen=True)
class Decision:
    """A placement and what it takes from the two workers."""

    placement: pb.Placement
    prefill_tokens: int
    prefill_s: float  # a cautious guess of when the prompt is computed
    decode_pages: int


def place(request: pb.PlaceRequest, fleet: Sequence[Worker], hits: Hits, rates: Rates) -> Decision:
    """The pair of workers where the request costs the least time.

    Raises TooLong if no worker could ever hold it, Overloaded if none can take or queue it now.
    """
    prompt_tokens = request.num_prompt_tokens
    prefills = _candidates(request, fleet, pb.ROLE_PREFILL, prompt_tokens, rates)
    decodes = _candidates(
        request, fleet, pb.ROLE_DECODE, prompt_tokens + request.max_new_tokens, rates
    )
    best_prefill = _best(request, prefills, hits, rates, cost.prefill_bid)
    best_decode = _best(request, decodes, hits, rates, cost.decode_bid)
    pairs = [(best_prefill[key], best_decode[key]) for key in best_prefill.keys() & best_decode]
    if not pairs:
        raise Overloaded("no prefill and decode worker agree on model weights and KV format")
    prefill, decode = min(pairs, key=_pair_rank)
    reason = f"prefill {_words(prefill, len(prefills))}; decode {_words(decode, len(decodes))}"
    placement = pb.Placement(
        prefill=prefill.worker.heartbeat.worker,
        decode=decode.worker.heartbeat.worker,
        prefill_hit_tokens=prefill.hit_tokens,
        decode_hit_tokens=decode.hit_tokens,
        reason=reason,
    )
    return Decision(placement, prefill.work_tokens, prefill.cost_s, decode.num_pages)


def _candidates(
    request: pb.PlaceRequest,
    fleet: Iterable[Worker],
    role: pb.Role,
    num_tokens: int,
    rates: Rates,
) -> list[Worker]:
    """The workers of a role that may take the request, now or after a queue."""
    name = _ROLE_NAMES[role]
    known = [worker for worker in fleet if _is_of(worker, role, request.model)]
    if not known:
        raise Overloaded(f"no {name} worker serves {request.model!r} now")
    limits = [worker.heartbeat.limits.max_sequence_tokens for worker in known]
    # A worker that is starting may not have told its limit yet: then nobody can say "never".
    if all(limits) and max(limits) < num_tokens:
        raise TooLong(f"{num_tokens} tokens are more than the {max(limits)} of any {name} worker")
    excluded = {key_of(worker) for worker in request.excluded}
    ready = [worker for worker in known if _can_take(worker, num_tokens, excluded)]
    if not ready:
        raise Overloaded(f"no {name} worker that could hold {num_tokens} tokens is ready")
    queueable = [worker for worker in ready if cost.num_waiting(worker) < rates.max_waiting]
    if not queueable:
        raise Overloaded(f"the queue of every {name} worker is full")
    return queueable


def _is_of(worker: Worker, role: pb.Role, model: str) -> bool:
    heartbeat = worker.heartbeat
    is_alive = heartbeat.state != pb.SERVICE_STATE_STOPPED
    return is_alive and heartbeat.role == role and heartbeat.model == model


def _can_take(worker: Worker, num_tokens: int, excluded: Collection[WorkerKey]) -> bool:
    heartbeat = worker.heartbeat
    return (
        heartbeat.state == pb.SERVICE_STATE_READY
        and heartbeat.limits.max_sequence_tokens >= num_tokens
        and worker.key not in excluded
    )


def _best(
    request: pb.PlaceRequest,
    workers: Iterable[Worker],
    hits: Hits,
    rates: Rates,
    price: _Price,
) -> dict[tuple[str, str, int], Bid]:
    """The best bid for each layout: costs of the two roles add up, so pairs need no search."""
    best: dict[tuple[str, str, int], Bid] = {}
    for worker in workers:
        bid = price(request, worker, hits.get(worker.key), rates)
        known = best.get(worker.layout_key)
        if known is None or bid.rank < known.rank:
            best[worker.layout_key] = bid
    return best


def _pair_rank(pair: tuple[Bid, Bid]) -> tuple[bool, bool, float, str, str]:
    prefill, decode = pair
    return (
        prefill.must_wait,
        decode.must_wait,
        prefill.cost_s + decode.cost_s,
        prefill.worker.key.worker_id,
        decode.worker.key.worker_id,
    )


def _words(bid: Bid, num_candidates: int) -> str:
    wait = ", must wait" if bid.must_wait else ""
    name = bid.worker.key.worker_id
    return f"{name} at {bid.cost_s:.3f} s of {num_candidates} ({bid.figures}{wait})"
