"""Placements not yet ended: what they will take, and which prefixes are being computed where.

A promise counts from the moment of the decision, so a burst is spread, or kept together, before any
heartbeat or block event can tell. It goes when the request ends, and at its deadline at the latest.
Sums are whole numbers that go with the promises they are made of, so nothing drifts.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from services.router.fleet import Heard
from services.router.policy import Decision
from services.router.view import Hit, Hits, Promised, Worker, WorkerKey, key_of
from shared import farspan_pb2 as pb
from shared.block_hash import HASH_BYTES
from shared.recent import Recent

# A submit arrives in milliseconds; a heartbeat this much later has counted it.
_SETTLE_S = 0.25
# Block events of a computed prompt reach the index in milliseconds; until then we know it alone.
_EVENTS_S = 2.0


@dataclass(frozen=True)
class Promise:
    """What one placement takes until it ends. Times are on this process's clock."""

    request_id: str
    reservation: pb.Reservation
    block_hashes: bytes  # while the prefix may be unknown to the index
    made_s: float
    is_own: bool  # made by this router; others' come through Redis

    @property
    def expires_s(self) -> float:
        """The request's deadline."""
        return self.made_s + self.reservation.lifetime_ms / 1000

    @property
    def known_s(self) -> float:
        """When the index must know the prefix, if anybody does."""
        return self.made_s + prefix_s(self.reservation)

    @property
    def prefill(self) -> WorkerKey:
        """Who computes the prompt."""
        return key_of(self.reservation.prefill)

    @property
    def decode(self) -> WorkerKey:
        """Who will hold it."""
        return key_of(self.reservation.decode)


@dataclass
class _Taken:
    """What the open promises take from one worker."""

    new: dict[str, Promise] = field(default_factory=dict)  # prefill: its heartbeat cannot know yet
    num_requests: int = 0
    num_pages: int = 0
    num_device_pages: int = 0


class Promises:
    """All open promises this router knows: its own, and those of routers it shares them with."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, Promise] = {}
        self._taken: dict[WorkerKey, _Taken] = defaultdict(_Taken)
        self._on_the_way: dict[bytes, dict[str, Promise]] = {}  # by the prompt's first hash
        self._expiries: list[tuple[float, str]] = []
        self._arrivals: list[tuple[float, str]] = []  # when prefixes are no longer on the way
        self._ended = Recent()  # a promise made or heard of later is void

    def __len__(self) -> int:
        self._expire()
        return len(self._open)

    def __iter__(self) -> Iterator[Promise]:
        self._expire()
        return iter(list(self._open.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def open_ids(self) -> Collection[str]:
        """Of all open promises."""
        return self._open.keys()

    def has_ended(self, request_id: str) -> bool:
        """Whether this request is over."""
        return request_id in self._ended

    def make(self, request: pb.PlaceRequest, decision: Decision, lifetime_s: float) -> Promise:
        """Keep what was decided, once, unless the request has ended meanwhile."""
        promise = Promise(
            request.request_id,
            reservation(decision, lifetime_s, request.gateway_id),
            request.block_hashes,
            self._clock(),
            is_own=True,
        )
        self.put(promise)
        return promise

    def put(self, promise: Promise) -> None:
        """Keep this promise instead of an earlier one, unless its request has ended."""
        if promise.request_id in self._ended:
            return
        self._drop(promise.request_id)
        self._open[promise.request_id] = promise
        heapq.heappush(self._expiries, (promise.expires_s, promise.request_id))
        self._taken[promise.prefill].new[promise.request_id] = promise
        self._count(promise, 1)
        if promise.block_hashes and self._clock() <= promise.known_s:
            first = promise.block_hashes[:HASH_BYTES]
            self._on_the_way.setdefault(first, {})[promise.request_id] = promise
            heapq.heappush(self._arrivals, (promise.known_s, promise.request_id))

    def end(self, request_id: str) -> None:
        """The request is over; a promise to it may still be on its way here."""
        self._drop(request_id)
        self._ended.add(request_id)

    def withdraw(self, request_id: str) -> None:
        """Forget a promise; the request may be promised something else."""
        self._drop(request_id)

    def get(self, request_id: str) -> Promise | None:
        """The open promise to this request."""
        return self._open.get(request_id)

    def applied(self, heard: Iterable[Heard]) -> list[Worker]:
        """The workers together with what was promised of them."""
        self._expire()
        return [Worker(one.heartbeat, self._promised(one)) for one in heard]

    def prefixes_on_the_way(self, block_hashes: bytes) -> dict[WorkerKey, Hit]:
        """Prefill workers that compute leading blocks of this prompt for somebody else now."""
        self._expire()
        longest: dict[WorkerKey, int] = {}
        for promise in self._on_the_way.get(block_hashes[:HASH_BYTES], {}).values():
            known = longest.get(promise.prefill, 0)
            if _hash_at(promise.block_hashes, known) == _hash_at(block_hashes, known) != b"":
                longest[promise.prefill] = _num_common_blocks(block_hashes, promise.block_hashes)
        return {
            key: Hit(num_blocks, pb.TIER_DEVICE, is_on_the_way=True)
            for key, num_blocks in longest.items()
        }

    def with_prefixes_on_the_way(self, hits: Hits, block_hashes: bytes) -> dict[WorkerKey, Hit]:
        """What the index knows, and what is on the way where that is longer."""
        longest = dict(hits)
        for key, hit in self.prefixes_on_the_way(block_hashes).items():
            if key not in longest or longest[key].num_blocks < hit.num_blocks:
                longest[key] = hit
        return longest

    def _promised(self, one: Heard) -> Promised:
        taken = self._taken.get(one.key)
        if taken is None:
            return Promised()
        for request_id, promise in list(taken.new.items()):
            if one.at_s >= promise.made_s + _SETTLE_S:
                del taken.new[request_id]
        return Promised(
            prefill_tokens=sum(each.reservation.prefill_tokens for each in taken.new.values()),
            num_new=len(taken.new),
            num_requests=taken.num_requests,
            num_pages=taken.num_pages,
            num_device_pages=taken.num_device_pages,
        )

    def _expire(self) -> None:
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, request_id = heapq.heappop(self._expiries)
            promise = self._open.get(request_id)
            if promise is not None and promise.expires_s <= now_s:
                self._drop(request_id)
        while self._arrivals and self._arrivals[0][0] < now_s:
            _, request_id = heapq.heappop(self._arrivals)
            promise = self._open.get(request_id)
            if promise is not None and promise.known_s < now_s:
                self._arrive(promise)

    def _drop(self, request_id: str) -> None:
        promise = self._open.get(request_id)
        if promise is None:
            return
        self._arrive(promise)
        del self._open[request_id]
        self._taken[promise.prefill].new.pop(request_id, None)
        self._count(promise, -1)
        for key in {promise.prefill, promise.decode}:
            if self._taken[key] == _Taken():
                del self._taken[key]

    def _arrive(self, promise: Promise) -> None:
        """Its prefix is on the way no longer, and its hashes need no room."""
        same_start = self._on_the_way.get(promise.block_hashes[:HASH_BYTES], {})
        if same_start.pop(promise.request_id, None) is None:
            return
        if not same_start:
            del self._on_the_way[promise.block_hashes[:HASH_BYTES]]
        self._open[promise.request_id] = Promise(
            promise.request_id, promise.reservation, b"", promise.made_s, promise.is_own
        )

    def _count(self, promise: Promise, sign: int) -> None:
        taken = self._taken[promise.decode]
        taken.num_requests += sign
        taken.num_pages += sign * promise.reservation.decode_pages
        taken.num_device_pages += sign * promise.reservation.device_pages


def reservation(decision: Decision, lifetime_s: float, gateway_id: str = "") -> pb.Reservation:
    """What a decision takes, as routers tell each other."""
    return pb.Reservation(
        prefill=decision.placement.prefill,
        decode=decision.placement.decode,
        prefill_tokens=decision.prefill_tokens,
        prefill_s=decision.prefill_s,
        decode_pages=decision.decode_pages,
        device_pages=decision.device_pages,
        lifetime_ms=int(lifetime_s * 1000),
        gateway_id=gateway_id,
    )


def prefix_s(reserved: pb.Reservation) -> float:
    """How long after its making the index may not know the prefix."""
    return reserved.prefill_s + _EVENTS_S


def _hash_at(block_hashes: bytes, place: int) -> bytes:
    return block_hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]


def _num_common_blocks(left: bytes, right: bytes) -> int:
    """How many leading hashes are equal. A hash covers all before it, so this is a search."""
    low, high = 0, min(len(left), len(right)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if _hash_at(left, middle - 1) == _hash_at(right, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
