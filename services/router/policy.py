"""Chooses the workers of a request: pure, deterministic, the same code live and in a replay.

Knows heartbeats, promises and prefix hits; knows no clock, no NATS, no text. Workers that cannot
hold the request, or not in time, are left out; the others are compared by the time it would take.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.router import cost
from services.router.cost import Bid
from services.router.view import Hit, Hits, Rates, Worker, WorkerKey, key_of
from shared import farspan_pb2 as pb
from shared.errors import DeadlineExceeded, FarspanError, Overloaded, TooLong
from shared.layout_key import LayoutKey

_BURST = 16  # requests that may wait at each of two workers for what both are computing
_ROLE_NAMES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}
_Price = Callable[[pb.PlaceRequest, Worker, Hit | None, Rates], Bid]


class Score(NamedTuple):
    """One worker in one decision: its bid, or why it was left out before or after it."""

    worker: Worker
    bid: Bid | None
    left_out: str = ""


@dataclass(frozen=True)
class Decision:
    """A placement and what it takes from the two workers."""

    placement: pb.Placement
    prefill_tokens: int
    prefill_s: float  # a cautious guess of when the prompt is computed
    decode_pages: int
    device_pages: int = 0


@dataclass(frozen=True)
class Judgement:
    """Everything the policy says about a request: exactly one of decision and refusal is set."""

    decision: Decision | None
    refusal: FarspanError | None
    scores: Sequence[Score]  # of every worker, in the order given

    def placed(self) -> Decision:
        """The decision. Raises the refusal."""
        if self.decision is None:
            assert self.refusal is not None, "a judgement without an outcome"
            raise self.refusal
        return self.decision


def place(
    request: pb.PlaceRequest,
    fleet: Sequence[Worker],
    hits: Hits,
    rates: Rates,
    lifetime_s: float = math.inf,
) -> Decision:
    """The pair of workers where the request costs the least time.

    Raises TooLong if no worker could ever hold it, Overloaded if none can take or queue it now, and
    DeadlineExceeded if none would send a token within `lifetime_s`.
    """
    return judge(request, fleet, hits, rates, lifetime_s).placed()


def judge(
    request: pb.PlaceRequest,
    fleet: Sequence[Worker],
    hits: Hits,
    rates: Rates,
    lifetime_s: float = math.inf,
) -> Judgement:
    """The decision or the refusal, with what every worker was worth."""
    scoring = _Scoring(request, hits, rates, lifetime_s)
    decision, refusal = None, None
    try:
        decision = scoring.decide(fleet)
    except FarspanError as error:
        refusal = error
    scores = [scoring.scores.get(worker.key, Score(worker, None, "not asked")) for worker in fleet]
    return Judgement(decision, refusal, scores)


class _Scoring:
    """One judgement in the making: notes what becomes of each worker."""

    def __init__(
        self, request: pb.PlaceRequest, hits: Hits, rates: Rates, lifetime_s: float
    ) -> None:
        self.scores: dict[WorkerKey, Score] = {}
        self._request = request
        self._hits = hits
        self._rates = rates
        self._lifetime_s = lifetime_s

    def decide(self, fleet: Iterable[Worker]) -> Decision:
        if self._lifetime_s <= 0:
            raise DeadlineExceeded("the request's deadline had passed before it was placed")
        prompt_tokens = self._request.num_prompt_tokens
        num_tokens = prompt_tokens + self._request.max_new_tokens
        prefills = self._candidates(fleet, pb.ROLE_PREFILL, prompt_tokens)
        decodes = self._candidates(fleet, pb.ROLE_DECODE, num_tokens)
        speeds = cost.measured(prefills, self._rates)
        prefill_bids = self._in_time(self._bids(prefills, cost.prefill_bid, speeds))
        prefill_bids = self._without_third_copies(prefill_bids)
        best_prefill = _best(prefill_bids)
        best_decode = _best(self._bids(decodes, cost.decode_bid, {}))
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
        return Decision(
            placement,
            prefill.work_tokens,
            prefill.cost_s,
            decode.num_pages,
            decode.num_device_pages,
        )

    def _candidates(self, fleet: Iterable[Worker], role: pb.Role, num_tokens: int) -> list[Worker]:
        """The workers of a role that may take the request, now or after a queue."""
        name, model = _ROLE_NAMES[role], self._request.model
        known = [worker for worker in fleet if self._is_of(worker, role)]
        if not known:
            raise Overloaded(f"no {name} worker serves {model!r} now")
        limits = [worker.heartbeat.limits.max_sequence_tokens for worker in known]
        # A worker that is starting may not have told its limit yet: then nobody can say "never".
        if all(limits) and max(limits) < num_tokens:
            self._leave_out(known, f"holds no {num_tokens} tokens")
            raise TooLong(
                f"{num_tokens} tokens are more than the {max(limits)} of any {name} worker"
            )
        excluded = {key_of(worker) for worker in self._request.excluded}
        ready = self._kept(known, lambda worker: _why_not(worker, num_tokens, excluded))
        if not ready:
            raise Overloaded(f"no {name} worker that could hold {num_tokens} tokens is ready")
        bound = cost.max_waiting(self._request, self._rates)

        def full(worker: Worker) -> str:
            return "" if cost.num_waiting(worker) < bound else f"{bound} or more wait there"

        queueable = self._kept(ready, full)
        if not queueable:
            raise Overloaded(f"the queue of every {name} worker is full: {bound} or more wait")
        return queueable

    def _without_third_copies(self, bids: Sequence[Bid]) -> list[Bid]:
        """A burst makes two copies of its prefix, unless a whole burst waits for both already."""
        kept = []
        for layout in {bid.worker.layout_key for bid in bids}:
            same = [bid for bid in bids if bid.worker.layout_key == layout]
            shared_blocks = cost.twice_on_the_way(self._hits.get(bid.worker.key) for bid in same)
            holders: list[Bid] = []
            third: list[Bid] = []
            for bid in same:
                hit = self._hits.get(bid.worker.key)
                is_third = cost.makes_third_copy(self._request, shared_blocks, hit)
                (third if is_third else holders).append(bid)
            kept += holders
            if all(bid.must_wait or cost.num_waiting(bid.worker) >= _BURST for bid in holders):
                kept += third
                continue
            for bid in third:
                reason = "two others are computing this prompt"
                self.scores[bid.worker.key] = Score(bid.worker, bid, reason)
        return kept

    def _is_of(self, worker: Worker, role: pb.Role) -> bool:
        heartbeat = worker.heartbeat
        if heartbeat.role != role:
            return False
        is_alive = heartbeat.state != pb.SERVICE_STATE_STOPPED
        if is_alive and heartbeat.model == self._request.model:
            return True
        self._leave_out([worker], "serves another model" if is_alive else "has stopped")
        return False

    def _kept(self, workers: Iterable[Worker], why_not: Callable[[Worker], str]) -> list[Worker]:
        kept = []
        for worker in workers:
            reason = why_not(worker)
            if reason:
                self._leave_out([worker], reason)
            else:
                kept.append(worker)
        return kept

    def _leave_out(self, workers: Iterable[Worker], reason: str) -> None:
        for worker in workers:
            self.scores[worker.key] = Score(worker, None, reason)

    def _bids(
        self, workers: Iterable[Worker], price: _Price, rates_of_ranks: Mapping[int, Rates]
    ) -> list[Bid]:
        bids = []
        for worker in workers:
            rates = rates_of_ranks.get(worker.heartbeat.layout.dcp_size, self._rates)
            bid = price(self._request, worker, self._hits.get(worker.key), rates)
            self.scores[worker.key] = Score(worker, bid)
            bids.append(bid)
        return bids

    def _in_time(self, bids: Sequence[Bid]) -> list[Bid]:
        """Those whose first token can come before the deadline.

        Nobody is refused on a guess: a worker that has not measured its speed is fast enough.
        """
        kept = [bid for bid in bids if bid.earliest_s <= self._lifetime_s]
        for bid in bids:
            if bid.earliest_s > self._lifetime_s:
                self.scores[bid.worker.key] = Score(bid.worker, bid, "would be too late")
        if not kept:
            fastest_s = min(bid.earliest_s for bid in bids)
            raise DeadlineExceeded(
                f"the prompt takes {fastest_s:.1f} s at the fastest prefill worker,"
                f" {self._lifetime_s:.1f} s are left"
            )
        return kept


def _why_not(worker: Worker, num_tokens: int, excluded: Collection[WorkerKey]) -> str:
    heartbeat = worker.heartbeat
    if heartbeat.state != pb.SERVICE_STATE_READY:
        return "is not ready"
    if not heartbeat.layout.model_fingerprint:
        return "has told no layout"  # equal silence would pass for an equal layout
    if heartbeat.limits.max_sequence_tokens < num_tokens:
        return f"holds no {num_tokens} tokens"
    return "has lost this request before" if worker.key in excluded else ""


def _best(bids: Iterable[Bid]) -> dict[LayoutKey, Bid]:
    """The best bid for each layout: costs of the two roles add up, so pairs need no search."""
    best: dict[LayoutKey, Bid] = {}
    for bid in bids:
        known = best.get(bid.worker.layout_key)
        if known is None or bid.rank < known.rank:
            best[bid.worker.layout_key] = bid
    return best


def _pair_rank(pair: tuple[Bid, Bid]) -> tuple[bool, bool, float, bytes, str, str]:
    prefill, decode = pair
    return (
        prefill.must_wait,
        decode.must_wait,
        prefill.cost_s + decode.cost_s,
        prefill.affinity,
        prefill.worker.key.worker_id,
        decode.worker.key.worker_id,
    )


def _words(bid: Bid, num_candidates: int) -> str:
    wait = ", must wait" if bid.must_wait else ""
    name = bid.worker.key.worker_id
    return f"{name} at {bid.cost_s:.3f} s of {num_candidates} ({bid.figures}{wait})"
