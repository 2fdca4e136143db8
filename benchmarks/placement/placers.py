"""Who chooses: the router's own policy, and the ones it is compared with.

Each gets the same: heartbeats, promises, hits (those on the way included). The baselines choose
the decode worker by the same rule as the prefill worker.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from benchmarks.placement.timing import RATES
from benchmarks.placement.workload import Request
from services.router import cost, policy
from services.router.policy import Decision
from services.router.view import Hit, Hits, Worker
from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS

_Choose = Callable[[Request, Sequence[Worker], Hits], Worker]


class Placer(Protocol):
    """Chooses a pair of workers."""

    def place(
        self, request: Request, message: pb.PlaceRequest, workers: Sequence[Worker], hits: Hits
    ) -> Decision:
        """Where the request goes."""


class Farspan:
    """The policy that the router runs."""

    def place(
        self, request: Request, message: pb.PlaceRequest, workers: Sequence[Worker], hits: Hits
    ) -> Decision:
        """By estimated time."""
        del request
        return policy.place(message, workers, hits, RATES)


class Baseline:
    """A rule that is applied to the workers of each role."""

    def __init__(self, prefill: _Choose, decode: _Choose) -> None:
        self._prefill = prefill
        self._decode = decode

    def place(
        self, request: Request, message: pb.PlaceRequest, workers: Sequence[Worker], hits: Hits
    ) -> Decision:
        """By the rule."""
        of_role = {
            role: [worker for worker in workers if worker.heartbeat.role == role]
            for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE)
        }
        prefill = self._prefill(request, of_role[pb.ROLE_PREFILL], hits)
        decode = self._decode(request, of_role[pb.ROLE_DECODE], hits)
        bid = cost.prefill_bid(message, prefill, hits.get(prefill.key), RATES)
        other = cost.decode_bid(message, decode, hits.get(decode.key), RATES)
        placement = pb.Placement(
            prefill=prefill.heartbeat.worker,
            decode=decode.heartbeat.worker,
            prefill_hit_tokens=bid.hit_tokens,
            decode_hit_tokens=other.hit_tokens,
        )
        return Decision(placement, bid.work_tokens, bid.cost_s, other.num_pages)


def round_robin() -> Baseline:
    """One after another."""
    return Baseline(_Turns().choose, _Turns().choose)


def least_loaded() -> Baseline:
    """The fewest tokens to compute; at decode the fewest requests."""
    return Baseline(
        lambda request, workers, hits: min(workers, key=_uncomputed_tokens),
        lambda request, workers, hits: min(workers, key=_num_requests),
    )


def sticky() -> Baseline:
    """A conversation's hash says where all of it goes."""
    return Baseline(_by_hash, _by_hash)


def weighted(seed: int) -> Baseline:
    """The published scorer: prefix 3, queue 2, KV utilisation 2; of equal ones any.

    Defaults of llm-d/llm-d-router (config/charts/routerlib/templates/_config.yaml, 00bacf3) and of
    kubernetes-sigs/gateway-api-inference-extension (config/charts/inferencepool/templates/
    epp-config.yaml, 0ae94df). It is given exact hits, and a queue that counts all requests not
    computed yet: a chunked engine hardly ever has any that wait in vLLM's sense.
    """
    rng = random.Random(seed)

    def choose(request: Request, workers: Sequence[Worker], hits: Hits) -> Worker:
        scores = _weighted_scores(request, workers, hits)
        return max(workers, key=lambda worker: (scores[worker.key.worker_id], rng.random()))

    return Baseline(choose, choose)


class _Turns:
    def __init__(self) -> None:
        self._count = count()

    def choose(self, request: Request, workers: Sequence[Worker], hits: Hits) -> Worker:
        del request, hits
        return workers[next(self._count) % len(workers)]


def _by_hash(request: Request, workers: Sequence[Worker], hits: Hits) -> Worker:
    del hits
    return workers[zlib.crc32(request.conversation.encode()) % len(workers)]


def _uncomputed_tokens(worker: Worker) -> int:
    return int(worker.heartbeat.load.waiting_tokens) + worker.promised.prefill_tokens


def _num_requests(worker: Worker) -> int:
    load = worker.heartbeat.load
    if worker.heartbeat.role == pb.ROLE_PREFILL:
        return int(load.num_running + load.num_waiting) + worker.promised.num_new
    return max(int(load.num_running + load.num_waiting), worker.promised.num_requests)


def _weighted_scores(request: Request, workers: Sequence[Worker], hits: Hits) -> dict[str, float]:
    queues = {worker.key.worker_id: _num_requests(worker) for worker in workers}
    shortest, longest = min(queues.values()), max(queues.values())
    num_blocks = max(1, request.turn.num_tokens // BLOCK_TOKENS)
    nothing = Hit(0, pb.TIER_DEVICE)
    scores = {}
    for worker in workers:
        name, load = worker.key.worker_id, worker.heartbeat.load
        queue = 1.0 if longest == shortest else (longest - queues[name]) / (longest - shortest)
        free = load.free_blocks / max(1, load.total_blocks)
        prefix = hits.get(worker.key, nothing).num_blocks / num_blocks
        scores[name] = 3 * prefix + 2 * queue + 2 * free
    return scores
