"""Placements not yet ended: what they will take, and which prefixes are being computed where.

A promise counts from the moment of the decision, so a burst is spread, or kept together, before any
heartbeat or block event can tell. It goes when the request ends, and at its deadline at the latest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.router.fleet import Heard
from services.router.policy import Decision
from services.router.view import Hit, Promised, Worker, WorkerKey, key_of
from shared import farspan_pb2 as pb
from shared.block_hash import HASH_BYTES
from shared.recent import Recent

# A submit arrives in milliseconds; a heartbeat this much later has counted it.
_SETTLE_S = 0.25
# Block events of a computed prompt reach the index in milliseconds; until then we know it alone.
_EVENTS_S = 2.0


@dataclass(frozen=True)
class _Promise:
    decision: Decision
    block_hashes: bytes
    made_s: float
    expires_s: float


class Promises:
    """What this router has promised. Promises of other routers show in the heartbeats only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._promises: dict[str, _Promise] = {}
        self._ended = Recent()  # perhaps while they were being placed

    def __len__(self) -> int:
        return len(self._live())

    def make(self, request: pb.PlaceRequest, decision: Decision, lifetime_s: float) -> None:
        """Keep what was decided, once, unless the request has ended meanwhile."""
        if request.request_id in self._ended:
            return
        now_s = self._clock()
        self._promises.pop(request.request_id, None)
        self._promises[request.request_id] = _Promise(
            decision, request.block_hashes, now_s, now_s + lifetime_s
        )

    def end(self, request_id: str) -> None:
        """Forget a request; one that is not known may still be on its way here."""
        if self._promises.pop(request_id, None) is None:
            self._ended.add(request_id)

    def applied(self, heard: Iterable[Heard]) -> list[Worker]:
        """The workers together with what was promised of them."""
        of_prefill: dict[WorkerKey, list[_Promise]] = defaultdict(list)
        of_decode: dict[WorkerKey, list[_Promise]] = defaultdict(list)
        for promise in self._live():
            of_prefill[key_of(promise.decision.placement.prefill)].append(promise)
            of_decode[key_of(promise.decision.placement.decode)].append(promise)
        workers = []
        for one in heard:
            new = [each for each in of_prefill[one.key] if one.at_s < each.made_s + _SETTLE_S]
            promised = Promised(
                prefill_tokens=sum(each.decision.prefill_tokens for each in new),
                num_new=len(new),
                num_requests=len(of_decode[one.key]),
                num_pages=sum(each.decision.decode_pages for each in of_decode[one.key]),
            )
            workers.append(Worker(one.heartbeat, promised))
        return workers

    def prefixes_on_the_way(self, block_hashes: bytes) -> dict[WorkerKey, Hit]:
        """Prefill workers that compute leading blocks of this prompt for somebody else now."""
        now_s = self._clock()
        hits: dict[WorkerKey, Hit] = {}
        for promise in self._live():
            if now_s > promise.made_s + promise.decision.prefill_s + _EVENTS_S:
                continue
            num_blocks = _num_common_blocks(block_hashes, promise.block_hashes)
            key = key_of(promise.decision.placement.prefill)
            if num_blocks and (key not in hits or hits[key].num_blocks < num_blocks):
                hits[key] = Hit(num_blocks, pb.TIER_DEVICE)
        return hits

    def _live(self) -> list[_Promise]:
        now_s = self._clock()
        for request_id, promise in list(self._promises.items()):
            if promise.expires_s <= now_s:
                del self._promises[request_id]
        return list(self._promises.values())


def _num_common_blocks(left: bytes, right: bytes) -> int:
    """How many leading hashes are equal. A hash covers all before it, so this is a search."""
    low, high = 0, min(len(left), len(right)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        place = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        if left[place] == right[place]:
            low = middle
        else:
            high = middle - 1
    return low
