"""What a request would cost at one worker: seconds, whether it fits now, and the figures behind it.

Pure. Seconds make tokens, bytes and queues comparable; each figure stands in the decision's reason.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from services.router.view import Hit, Rates, Worker
from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS

# A second of computing delays whoever comes next as much as the request itself: it counts twice.
_OWN_WEIGHT = 2.0
# Prefill serves the prompt with the least left first, but every fourth step goes by age.
_BY_REMAINING_SHARE = 3 / 4
# What was not used for so long is wanted again with a chance of 1/e: agents pause for seconds to a
# few minutes. From 200 to 1,200 s the replay (docs/placement.md) shows little difference.
_FORGOTTEN_S = 200.0
# A speed measured longer ago prices a request, but refuses none: it may have been one bad minute,
# and a worker that gets nothing never measures a better one.
_STALE_S = 60.0

_QUEUE_SHARES = {-2: 0.25, -1: 0.5, 0: 0.75, 1: 0.875, 2: 1.0}  # of Rates.max_waiting
MIN_PRIORITY, MAX_PRIORITY = min(_QUEUE_SHARES), max(_QUEUE_SHARES)


class Bid(NamedTuple):
    """One worker's price for a request."""

    worker: Worker
    must_wait: bool  # its budgets are taken now
    cost_s: float
    hit_tokens: int
    work_tokens: int  # prefill: tokens to compute
    num_pages: int  # decode: pages to take in host and index pool
    num_device_pages: int  # decode: and in the device pool; 0 = the worker has not told
    earliest_s: float  # the first token cannot come sooner; 0 where nothing is measured
    figures: str
    affinity: bytes  # of worker and session: a session prefers the same worker every time

    @property
    def rank(self) -> tuple[bool, float, bytes, int, str]:
        """Lower is better. Of equal ones the session's own, where the client tells a session: its
        next turn may come before the index knows what this one leaves behind. Then the emptiest, so
        that what grows finds room everywhere.

        Worker ids break ties, so the choice does not depend on any order.
        """
        num_empty = self.worker.heartbeat.load.empty_blocks
        name = self.worker.key.worker_id
        return self.must_wait, self.cost_s, self.affinity, -num_empty, name


def prefill_bid(request: pb.PlaceRequest, worker: Worker, hit: Hit | None, rates: Rates) -> Bid:
    """Time until the prompt is computed, own work counted twice, and what others lose by it."""
    load, prompt_tokens = worker.heartbeat.load, request.num_prompt_tokens
    # The last token is computed in any case: its logits give the first token.
    hit_tokens = _hit_tokens(hit, prompt_tokens - 1)
    own_tokens = prompt_tokens - hit_tokens
    tokens_per_s = max(load.tokens_per_s, rates.prefill_tokens_per_s)
    before_s = _tokens_before(worker, own_tokens) / tokens_per_s
    # What others compute for this prompt too must be there before its own part begins.
    awaited_tokens = hit_tokens if hit is not None and hit.is_on_the_way else 0
    awaited_s = min(awaited_tokens, _queued_tokens(worker)) / tokens_per_s
    queue_s = max(before_s, awaited_s) + _step_wait_s(worker)
    is_measured = load.tokens_per_s > 0 and load.measured_age_s < _STALE_S
    own_s = own_tokens / tokens_per_s
    if hit is not None and hit.tier == pb.TIER_HOST:
        own_s += hit_tokens * worker.kv_bytes_per_token / rates.host_load_bytes_per_s
    block_tokens = BLOCK_TOKENS * max(1, worker.heartbeat.layout.dcp_size)
    num_blocks = _ceil(prompt_tokens, block_tokens) - hit_tokens // block_tokens
    num_promised_blocks = _ceil(worker.promised.prefill_tokens, block_tokens)
    lost_tokens = max(0, num_blocks - load.empty_blocks) * block_tokens
    lost_s = lost_tokens / tokens_per_s * _chance_of_reuse(load.eviction_age_s)
    return Bid(
        worker,
        must_wait=num_blocks + num_promised_blocks > load.free_blocks,
        cost_s=queue_s + _OWN_WEIGHT * own_s + lost_s,
        hit_tokens=hit_tokens,
        work_tokens=own_tokens,
        num_pages=0,
        num_device_pages=0,
        earliest_s=before_s + own_s if is_measured else 0.0,
        figures=f"queue {queue_s:.3f} s, own {own_s:.3f} s, evicts {lost_s:.3f} s,"
        f" hit {hit_tokens} tokens",
        affinity=_affinity(request, worker),
    )


def twice_on_the_way(hits: Iterable[Hit | None]) -> int:
    """The leading blocks that two of these workers at least are computing for others now."""
    lengths = sorted(hit.num_blocks for hit in hits if hit is not None and hit.is_on_the_way)
    return lengths[-2] if len(lengths) > 1 else 0


def makes_third_copy(request: pb.PlaceRequest, shared_blocks: int, hit: Hit | None) -> bool:
    """Whether a worker with this hit would compute what two others are computing.

    Only if that is nearly the whole prompt, for a longer tail may be worth a copy, and if it is
    much: an eighth and a block, since what is common need not end with one.
    """
    little = request.num_prompt_tokens // 8 + BLOCK_TOKENS
    tail_tokens = request.num_prompt_tokens - shared_blocks * BLOCK_TOKENS
    again_tokens = (shared_blocks - (0 if hit is None else hit.num_blocks)) * BLOCK_TOKENS
    return tail_tokens <= little < again_tokens


def measured(workers: Iterable[Worker], rates: Rates) -> dict[int, Rates]:
    """The rates for prefill workers of so many ranks: the best speed that any of these measured.

    Steps that compute little are slow for what they compute. So a worker with good hits measures
    less than it can do; taken at its word it would look slow, and new prompts would all go where
    nothing hits.
    """
    best: dict[int, Rates] = {}
    for worker in workers:
        ranks, tokens_per_s = worker.heartbeat.layout.dcp_size, worker.heartbeat.load.tokens_per_s
        known = best.setdefault(ranks, replace(rates, prefill_tokens_per_s=0.0))
        if tokens_per_s > known.prefill_tokens_per_s:
            best[ranks] = replace(rates, prefill_tokens_per_s=tokens_per_s)
    return {ranks: each if each.prefill_tokens_per_s else rates for ranks, each in best.items()}


def decode_bid(request: pb.PlaceRequest, worker: Worker, hit: Hit | None, rates: Rates) -> Bid:
    """Time until the missing KV has arrived, plus the worker's pressure expressed in seconds."""
    load = worker.heartbeat.load
    # As at prefill the last token is computed anew, so of its block nothing is kept.
    hit_tokens = _hit_tokens(hit, request.num_prompt_tokens - 1)
    missing_tokens = request.num_prompt_tokens - hit_tokens
    link_s = worker.kv_bytes_per_token / rates.link_bytes_per_s
    import_s = (load.waiting_tokens + missing_tokens) * link_s
    num_pages = num_decode_pages(request) - hit_tokens // BLOCK_TOKENS
    host = _fullness(load.free_blocks, load.total_blocks, worker.promised.num_pages, num_pages)
    index = _fullness(
        load.free_index_pages, load.total_index_pages, worker.promised.num_pages, num_pages
    )
    device_pages = num_device_pages(request, worker.heartbeat.limits)
    device = _fullness(
        load.free_device_pages,
        load.total_device_pages,
        worker.promised.num_device_pages,
        max(1, device_pages),
    )
    num_requests = max(load.num_running + load.num_waiting, worker.promised.num_requests)
    max_concurrent = max(1, worker.heartbeat.limits.max_concurrent)
    fullness = max(host, index, device)
    pressure_s = rates.pressure_s * (min(1.0, fullness) + num_requests / max_concurrent)
    return Bid(
        worker,
        must_wait=fullness > 1.0 or num_requests >= max_concurrent,
        cost_s=import_s + pressure_s,
        hit_tokens=hit_tokens,
        work_tokens=0,
        num_pages=num_pages,
        num_device_pages=device_pages,
        earliest_s=0.0,  # prefill sends the first token itself
        figures=f"import {import_s:.3f} s, pressure {pressure_s:.3f} s, hit {hit_tokens} tokens",
        affinity=_affinity(request, worker),
    )


def _affinity(request: pb.PlaceRequest, worker: Worker) -> bytes:
    """By rendezvous hashing: who comes or goes moves no other session. Empty = no session."""
    if not request.session:
        return b""
    text = f"{worker.key.worker_id} {request.session}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def num_decode_pages(request: pb.PlaceRequest) -> int:
    """Host and index pages for the prompt and the longest answer."""
    return _ceil(request.num_prompt_tokens + request.max_new_tokens, BLOCK_TOKENS)


def num_device_pages(request: pb.PlaceRequest, limits: pb.Limits) -> int:
    """What decode reserves on the device: all pages of a short sequence, a lease for a long one.

    0 where the worker has not told; then one free page has to do.
    """
    num_pages = num_decode_pages(request)
    return num_pages if num_pages <= limits.max_whole_pages else limits.leased_device_pages


def max_waiting(request: pb.PlaceRequest, rates: Rates) -> int:
    """How long a queue the request may join: the router's only use of priorities.

    While queues are short everybody is taken. As they grow, the least important are refused first,
    and what is left of a queue is for those above them.
    """
    return int(rates.max_waiting * _QUEUE_SHARES[priority(request)])


def priority(request: pb.PlaceRequest) -> int:
    """From MIN_PRIORITY to MAX_PRIORITY, whatever was asked for."""
    return max(MIN_PRIORITY, min(MAX_PRIORITY, request.priority))


def num_waiting(worker: Worker) -> int:
    """Requests that queue at a worker, those it has not told of yet included."""
    load = worker.heartbeat.load
    if worker.heartbeat.role == pb.ROLE_PREFILL:
        return load.num_waiting + worker.promised.num_new
    max_concurrent = worker.heartbeat.limits.max_concurrent
    return max(load.num_waiting, worker.promised.num_requests - max_concurrent)


def _tokens_before(worker: Worker, own_tokens: int) -> float:
    """The queued tokens that are computed before a prompt's own: as many of each other one at most.

    So a turn with a good hit does not flee from a long prompt that it would overtake.
    """
    queued_tokens = _queued_tokens(worker)
    load, promised = worker.heartbeat.load, worker.promised
    num_queued = load.num_running + load.num_waiting + promised.num_new
    if num_queued == 0:
        return queued_tokens  # nobody says how many prompts share them
    return min(queued_tokens, num_queued * own_tokens / _BY_REMAINING_SHARE)


def _step_wait_s(worker: Worker) -> float:
    """What steps cost a prompt behind others, however little they compute: a usual one.

    Half of it is what is left of the step that runs, which nobody interrupts; the other half is
    what the others fill the prompt's own last step with.
    """
    return worker.heartbeat.load.step_s if _queued_tokens(worker) else 0.0


def _queued_tokens(worker: Worker) -> int:
    """To compute there, those on the way to it included."""
    return worker.heartbeat.load.waiting_tokens + worker.promised.prefill_tokens


def _chance_of_reuse(unused_s: float) -> float:
    """That what has lain unused so long is wanted again; 0 s: nothing is known of it."""
    return math.exp(-unused_s / _FORGOTTEN_S) if unused_s else 0.0


def _hit_tokens(hit: Hit | None, max_tokens: int) -> int:
    """Whole blocks only."""
    if hit is None:
        return 0
    return min(hit.num_blocks, max_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _fullness(num_free: int, num_total: int, num_promised: int, num_needed: int) -> float:
    """The share of a pool that is taken with this request; above 1 it does not fit.

    A worker's own count knows other routers' requests, our promises know those on the way; the
    larger one is nearer the truth, and their sum would count most requests twice.
    """
    if num_total == 0:
        return 0.0 if num_needed == 0 else 2.0
    return (max(num_total - num_free, num_promised) + num_needed) / num_total


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)
