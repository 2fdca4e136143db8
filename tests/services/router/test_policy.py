import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from services.decode import offers
from services.router import cost
from services.router.fleet import Heard
from services.router.policy import judge, place
from services.router.promises import Promises
from services.router.view import Hit, Hits, Promised, Rates, Worker, WorkerKey
from shared import farspan_pb2 as pb
from shared.errors import DeadlineExceeded, FarspanError, Overloaded, TooLong, WorkerLost
from tests.services.router.fleets import LAYOUT, MODEL, Clock, chain, decode, load, prefill, request

RATES = Rates()
OTHER_WEIGHTS = pb.KvLayout(model_fingerprint="g", kv_format="fp8_ds_mla", block_tokens=64)


def chosen(
    placing: pb.PlaceRequest, fleet: list[Worker], hits: Hits | None = None
) -> tuple[str, str]:
    placement = place(placing, fleet, hits or {}, RATES).placement
    return placement.prefill.worker_id, placement.decode.worker_id


def device_hit(worker_id: str, num_blocks: int) -> dict[WorkerKey, Hit]:
    return {WorkerKey(worker_id, 1): Hit(num_blocks, pb.TIER_DEVICE)}


def test_the_shorter_queue_wins_without_hits() -> None:
    """On a miss load decides, nothing else (C7)."""
    fleet = [
        prefill("p0", load=load(waiting_tokens=50_000)),
        prefill("p1"),
        decode("d0", load=load(num_running=20)),
        decode("d1"),
    ]

    assert chosen(request(), fleet) == ("p1", "d1")


def of_session(session: str) -> pb.PlaceRequest:
    asked = request()
    asked.session = session
    return asked


def test_a_session_stays_with_its_workers_where_nothing_else_decides() -> None:
    """Whatever order they are known in, and while others come and go; many sessions use all."""
    fleet = [prefill(f"p{n}") for n in range(4)] + [decode(f"d{n}") for n in range(4)]
    first = {name: chosen(of_session(name), fleet) for name in map(str, range(64))}

    smaller = [worker for worker in fleet if worker.key.worker_id not in ("p3", "d3")]
    for name, (p, d) in first.items():
        assert chosen(of_session(name), fleet[::-1]) == (p, d)
        assert p == "p3" or chosen(of_session(name), smaller)[0] == p
    assert {p for p, _ in first.values()} == {"p0", "p1", "p2", "p3"}


def test_a_session_does_not_wait_where_another_worker_is_free() -> None:
    """It decides between equals only."""
    for name in map(str, range(8)):
        fleet = [prefill("p0", load=load(waiting_tokens=50_000)), prefill("p1"), decode("d0")]

        assert chosen(of_session(name), fleet)[0] == "p1"


def test_a_hit_wins_over_a_small_queue_but_not_over_a_long_one() -> None:
    """Waiting is worth exactly the computing it saves, for everyone."""
    hits = device_hit("p0", 100)

    def with_queue(waiting_tokens: int) -> list[Worker]:
        busy = prefill("p0", load=load(waiting_tokens=waiting_tokens))
        return [busy, prefill("p1"), decode("d0")]

    assert chosen(request(6500), with_queue(5000), hits)[0] == "p0"
    assert chosen(request(6500), with_queue(50_000), hits)[0] == "p1"


def test_a_turn_stays_with_its_prefix_behind_a_long_prompt_that_it_overtakes() -> None:
    """Its own work is done first; moving would compute 100,000 tokens again."""
    busy = prefill("p0", load=load(num_running=1, waiting_tokens=900_000))
    fleet = [busy, prefill("p1"), decode("d0")]

    assert chosen(request(100_700), fleet, device_hit("p0", 1563))[0] == "p0"
    assert chosen(request(100_700), fleet)[0] == "p1"


def test_a_small_hit_is_not_worth_waiting_for_a_step() -> None:
    """512 tokens are computed in less time than a step takes; a good hit still is."""
    busy = prefill("p0", load=load(num_running=1, waiting_tokens=64, step_s=0.15))
    fleet = [busy, prefill("p1"), decode("d0")]

    assert chosen(request(20_000), fleet, device_hit("p0", 8))[0] == "p1"
    assert chosen(request(20_000), fleet, device_hit("p0", 80))[0] == "p0"


def test_a_cold_prompt_goes_where_the_oldest_blocks_lie() -> None:
    """So the workers' caches together forget as one cache would: the least recently used first."""
    fleet = [
        prefill("p0", load=load(eviction_age_s=20)),
        prefill("p1", load=load(eviction_age_s=900)),
        prefill("p2", load=load(eviction_age_s=300)),
        decode("d0"),
    ]

    assert chosen(request(100_000), fleet)[0] == "p1"
    with_room = [*fleet, prefill("p3", load=load(eviction_age_s=20, empty_blocks=1600))]
    assert chosen(request(100_000), with_room)[0] == "p3", "it has empty blocks"


def test_while_there_is_room_everywhere_the_emptiest_worker_is_filled() -> None:
    """Filling one after another would leave its sessions no room to grow."""
    fleet = [
        prefill("p0", load=load(empty_blocks=8000)),
        prefill("p1", load=load(empty_blocks=15_000)),
        decode("d0"),
    ]

    assert chosen(request(100_000), fleet)[0] == "p1"


def test_a_worker_whose_steps_are_small_is_not_taken_for_slow() -> None:
    """Else all cold prompts would gather where nothing hits, and drive out what did."""
    warm = prefill("p0", load=load(tokens_per_s=2000))
    cold = prefill("p1", load=load(tokens_per_s=20_000, waiting_tokens=1000))

    assert chosen(request(50_000), [warm, cold, decode("d0")])[0] == "p0"


def test_a_host_hit_is_worth_less_than_a_device_hit_and_more_than_none() -> None:
    """Loading from the host tier takes time too."""
    hits = {
        WorkerKey("p1", 1): Hit(1000, pb.TIER_HOST),
        WorkerKey("p2", 1): Hit(1000, pb.TIER_DEVICE),
    }
    fleet = [prefill("p0"), prefill("p1"), prefill("p2"), decode("d0")]

    assert chosen(request(64_100), fleet, hits)[0] == "p2"
    assert chosen(request(64_100), fleet[:2] + fleet[3:], hits)[0] == "p1"


def test_decode_goes_where_the_fewest_bytes_are_missing() -> None:
    """A delta handoff moves only what decode does not hold; for long prompts that is most of it."""
    fleet = [prefill("p0"), decode("d0"), decode("d1", load=load(num_running=4))]

    assert chosen(request(500_000), fleet)[1] == "d0"
    assert chosen(request(500_000), fleet, device_hit("d1", 7000))[1] == "d1"


def test_ties_are_broken_by_the_worker_id_whatever_the_order() -> None:
    """Two routers with the same view decide alike."""
    fleet = [decode("d1"), prefill("p1"), prefill("p0"), decode("d0")]

    assert chosen(request(), fleet) == chosen(request(), fleet[::-1]) == ("p0", "d0")


def test_a_hit_of_a_past_life_counts_for_nothing() -> None:
    """The index may be late; the blocks are gone (B1)."""
    fleet = [prefill("p0"), prefill("p1", epoch=2), decode("d0")]

    decision = place(request(), fleet, device_hit("p1", 15), RATES)

    assert decision.placement.prefill.worker_id == "p0"
    assert decision.placement.prefill_hit_tokens == 0


def test_a_whole_hit_leaves_the_last_token_to_compute() -> None:
    """Its logits give the first token of the answer."""
    fleet = [prefill("p0"), decode("d0")]
    hits = device_hit("p0", 2) | device_hit("d0", 2)

    decision = place(request(128), fleet, hits, RATES)

    assert decision.placement.prefill_hit_tokens == 64
    assert decision.prefill_tokens == 64
    assert decision.placement.decode_hit_tokens == 64
    assert decision.decode_pages == 3, "128 + 100 tokens are 4 pages, 1 of them is there"


def test_a_long_request_goes_to_the_worker_that_can_hold_it() -> None:
    """Limits are the worker's own word for what it could ever hold."""
    small = pb.Limits(max_sequence_tokens=1000, max_concurrent=32)
    fleet = [
        prefill("p0", limits=small),
        prefill("p1", load=load(waiting_tokens=10**6)),
        decode("d0", limits=small),
        decode("d1", load=load(num_running=30)),
    ]

    assert chosen(request(999, 1), fleet) == ("p0", "d0")
    assert chosen(request(1001, 1), fleet) == ("p1", "d1")


def test_a_request_that_fits_nowhere_ever_is_too_long() -> None:
    """Told at once and never retried; the figures say what would fit (D4)."""
    small = pb.Limits(max_sequence_tokens=1000, max_concurrent=32)
    fleet = [prefill("p0"), decode("d0", limits=small)]

    with pytest.raises(TooLong, match="1001 tokens are more than the 1000 of any decode worker"):
        place(request(901, 100), fleet, {}, RATES)


def test_a_worker_that_has_not_told_its_limit_yet_makes_never_unsure() -> None:
    """It is starting: the request may fit in a moment."""
    small = pb.Limits(max_sequence_tokens=10, max_concurrent=32)
    starting = decode("d1", state=pb.SERVICE_STATE_STARTING, limits=pb.Limits(max_concurrent=1))

    with pytest.raises(Overloaded):
        place(request(), [prefill("p0"), decode("d0", limits=small), starting], {}, RATES)


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        pytest.param([], "no prefill worker serves", id="nobody"),
        pytest.param([prefill("p0")], "no decode worker serves", id="no-decode"),
        pytest.param(
            [prefill("p0", state=pb.SERVICE_STATE_DRAINING), decode("d0")],
            "no prefill worker that could hold 1000 tokens is ready",
            id="draining",
        ),
        pytest.param(
            [prefill("p0"), decode("d0", model="other")], "no decode worker serves", id="model"
        ),
        pytest.param(
            [prefill("p0"), decode("d0", layout=OTHER_WEIGHTS)],
            "agree on model weights and KV format",
            id="layout",
        ),
        pytest.param(
            [prefill("p0"), decode("d0", load=load(num_waiting=RATES.max_waiting))],
            "the queue of every decode worker is full",
            id="queue",
        ),
    ],
)
def test_what_cannot_be_placed_now_is_overload_with_a_reason(
    fleet: list[Worker], message: str
) -> None:
    """The gateway retries these, and tells the client if it gives up."""
    with pytest.raises(Overloaded, match=message):
        place(request(), fleet, {}, RATES)


def test_excluded_workers_are_not_chosen_again_until_they_restart() -> None:
    """They have lost this request; a new life has not."""
    fleet = [prefill("p0"), prefill("p1", load=load(waiting_tokens=10**6)), decode("d0")]
    lost = pb.WorkerRef(worker_id="p0", epoch=1)

    assert chosen(request(excluded=[lost]), fleet)[0] == "p1"
    reborn = [prefill("p0", epoch=2), *fleet[1:]]
    assert chosen(request(excluded=[lost]), reborn)[0] == "p0"


def test_layouts_that_differ_in_ranks_and_interleave_fit_together() -> None:
    """Re-layout is decode's work on import; weights and format must be equal."""
    sharded = pb.KvLayout()
    sharded.CopyFrom(LAYOUT)
    sharded.dcp_size, sharded.interleave = 8, 64

    assert chosen(request(), [prefill("p0", layout=sharded), decode("d0")]) == ("p0", "d0")


@pytest.mark.parametrize("pool", ["free_blocks", "free_index_pages", "free_device_pages"])
def test_a_full_pool_sends_the_request_elsewhere_and_queues_it_when_all_are_full(
    pool: str,
) -> None:
    """Each of decode's budgets counts; a full fleet queues instead of refusing (E1, E2)."""
    full = load(**{pool: 0})
    fleet = [prefill("p0"), decode("d0", load=full), decode("d1", load=load(num_running=31))]

    assert chosen(request(), fleet)[1] == "d1"
    queued = place(request(), [prefill("p0"), decode("d0", load=full)], {}, RATES).placement
    assert queued.decode.worker_id == "d0"
    assert "must wait" in queued.reason


def test_the_reason_tells_the_figures_that_decided() -> None:
    """A slow first token must be explainable afterwards."""
    fleet = [prefill("p0", load=load(waiting_tokens=5000)), decode("d0")]

    reason = place(request(1000), fleet, device_hit("p0", 10), RATES).placement.reason

    assert "prefill p0" in reason and "queue 0.500 s" in reason and "hit 640 tokens" in reason
    assert "decode d0" in reason and "pressure" in reason


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model_fingerprint", "g"),
        ("kv_format", "fp32"),
        ("block_tokens", 128),
        ("num_mla_layers", 80),
        ("num_index_layers", 23),
        ("row_bytes", 657),
        ("index_page_bytes", 8449),
        ("dcp_size", 8),
        ("interleave", 64),
    ],
)
def test_a_pair_is_placed_exactly_where_its_handshake_succeeds(field: str, other: object) -> None:
    """A placement that decode must refuse costs the request an attempt (B18)."""
    layout = pb.KvLayout()
    layout.CopyFrom(LAYOUT)
    setattr(layout, field, other)
    fleet = [prefill("p0", layout=layout), decode("d0")]

    is_placed = judge(request(), fleet, {}, RATES).decision is not None
    try:
        offers._check_layout(layout, LAYOUT)
        is_accepted = True
    except WorkerLost:
        is_accepted = False

    assert is_placed == is_accepted == (field in ("dcp_size", "interleave"))


def test_a_long_sequence_needs_a_lease_of_the_device_pool_and_a_short_one_all_its_pages() -> None:
    """What decode's admission will reserve: with less, the request would wait there (E2)."""
    limits = pb.Limits(
        max_sequence_tokens=1_048_576, max_concurrent=32, max_whole_pages=18, leased_device_pages=18
    )

    def free(num_pages: int) -> list[Worker]:
        tight = load(free_device_pages=num_pages, total_device_pages=100)
        busy = decode("d1", load=load(num_running=31, free_blocks=15_000), limits=limits)
        return [prefill("p0"), decode("d0", load=tight, limits=limits), busy]

    assert chosen(request(500, 100), free(10))[1] == "d0"
    assert chosen(request(500, 100), free(9))[1] == "d1"
    assert chosen(request(900_000, 100), free(18))[1] == "d0"
    assert chosen(request(900_000, 100), free(17))[1] == "d1"
    assert place(request(900_000, 100), free(18), {}, RATES).device_pages == 18


def test_the_device_pages_of_promises_count() -> None:
    """Two requests must not both get the last lease."""
    limits = pb.Limits(
        max_sequence_tokens=1_048_576, max_concurrent=32, max_whole_pages=18, leased_device_pages=18
    )
    pool = load(free_device_pages=20, total_device_pages=20)
    taken = decode("d0", Promised(num_requests=1, num_device_pages=18), load=pool, limits=limits)
    busy = decode("d1", load=load(num_running=31), limits=limits)

    assert chosen(request(9000), [prefill("p0"), taken, busy])[1] == "d1"


def test_a_request_that_cannot_be_in_time_anywhere_is_refused_at_once() -> None:
    """Queueing it would take time from those that still can be."""
    slow = prefill("p0", load=load(waiting_tokens=90_000))
    faster = prefill("p1", load=load(waiting_tokens=40_000))
    fleet = [slow, faster, decode("d0")]

    with pytest.raises(DeadlineExceeded, match=r"takes 5\.0 s at the fastest.* 4\.9 s are left"):
        place(request(10_000), fleet, {}, RATES, lifetime_s=4.9)
    assert place(request(10_000), fleet, {}, RATES, lifetime_s=5.1).placement.prefill.worker_id


def test_a_worker_that_would_be_too_late_is_not_chosen_for_its_hit() -> None:
    """The cheapest place is no use after the deadline."""
    cached = prefill("p0", load=load(waiting_tokens=60_000))
    fleet = [cached, prefill("p1"), decode("d0")]
    hits = device_hit("p0", 560)

    assert chosen(request(40_000), fleet, hits)[0] == "p0"
    judged = judge(request(40_000), fleet, hits, RATES, lifetime_s=5.0)

    assert judged.placed().placement.prefill.worker_id == "p1"
    assert [score.left_out for score in judged.scores] == ["would be too late", "", ""]


def test_nobody_is_refused_on_a_guess_of_a_workers_speed() -> None:
    """A fleet that has just started has measured nothing; an idle one measured one bad minute."""
    unmeasured = prefill("p0", load=load(tokens_per_s=0, waiting_tokens=10**6))
    stale = prefill("p0", load=load(tokens_per_s=40, measured_age_s=61))
    slow = prefill("p0", load=load(tokens_per_s=40, measured_age_s=59))

    for worker in (unmeasured, stale):
        placed = place(request(10_000), [worker, decode("d0")], {}, RATES, lifetime_s=0.1)
        assert placed.placement.prefill.worker_id == "p0"
    with pytest.raises(DeadlineExceeded):
        place(request(10_000), [slow, decode("d0")], {}, RATES, lifetime_s=0.1)


@pytest.mark.parametrize(
    ("priority", "longest"),
    [(-99, 63), (-2, 63), (-1, 127), (0, 191), (1, 223), (2, 255), (9, 255)],
)
def test_the_less_important_are_refused_at_shorter_queues(priority: int, longest: int) -> None:
    """Priority decides nothing else, and what is out of range counts as the nearest."""

    def queue(num_waiting: int) -> list[Worker]:
        return [prefill("p0", load=load(num_waiting=num_waiting)), decode("d0")]

    assert chosen(request(priority=priority), queue(longest)) == ("p0", "d0")
    with pytest.raises(Overloaded, match=f"{longest + 1} or more wait"):
        place(request(priority=priority), queue(longest + 1), {}, RATES)


def test_turns_of_a_session_stay_and_move_when_moving_is_cheaper() -> None:
    """Affinity is nothing but the hit: a queue longer than the hit is worth ends it."""
    turns = [(1, 10_000), (2, 12_000), (3, 14_000)]
    hits: dict[WorkerKey, Hit] = {}
    for number, num_tokens in turns:
        # p1 has less to do at each turn; what p0 holds is worth more
        fleet = [prefill("p0", load=load(waiting_tokens=4000)), prefill("p1"), decode("d0")]
        if number == 1:
            fleet = [prefill("p0"), prefill("p1", load=load(waiting_tokens=1)), decode("d0")]
        assert chosen(request(num_tokens), fleet, hits)[0] == "p0", f"turn {number}"
        hits = device_hit("p0", num_tokens // 64)

    hot = [prefill("p0", load=load(waiting_tokens=40_000)), prefill("p1"), decode("d0")]
    assert chosen(request(16_000), hot, hits)[0] == "p1"
    assert chosen(request(16_000, hashes=b""), hot[::-1], {})[0] == "p1"


def test_one_hot_worker_ends_affinity_for_its_own_requests_only() -> None:
    """Others keep going where their prefixes are (C6)."""
    hot = prefill("p0", load=load(waiting_tokens=10**6))
    fleet = [hot, prefill("p1"), prefill("p2", load=load(waiting_tokens=2000)), decode("d0")]

    assert chosen(request(20_000), fleet, device_hit("p0", 300))[0] == "p1"
    assert chosen(request(20_000), fleet, device_hit("p2", 300))[0] == "p2"


def test_every_worker_has_a_score_or_a_reason() -> None:
    """Who asks later why a worker was not chosen must find the answer."""
    fleet = [
        prefill("p0"),
        prefill("p1", load=load(waiting_tokens=5000)),
        prefill("p2", state=pb.SERVICE_STATE_DRAINING),
        prefill("p3", load=load(num_waiting=256)),
        decode("d0"),
        decode("d1", model="other"),
        decode("d2", limits=pb.Limits(max_sequence_tokens=10, max_concurrent=1)),
    ]

    judged = judge(request(excluded=[pb.WorkerRef(worker_id="p9", epoch=1)]), fleet, {}, RATES)

    assert [score.worker for score in judged.scores] == fleet
    assert [score.left_out for score in judged.scores] == [
        "",
        "",
        "is not ready",
        "192 or more wait there",
        "",
        "serves another model",
        "holds no 1100 tokens",
    ]
    assert all((score.bid is None) == bool(score.left_out) for score in judged.scores)


def test_a_worker_that_has_told_no_layout_is_not_paired() -> None:
    """Two that say nothing would look alike, and KV would be read as what it is not."""
    silent = [prefill("p0", layout=pb.KvLayout()), decode("d0", layout=pb.KvLayout())]

    with pytest.raises(Overloaded):
        place(request(), silent, {}, RATES)
    judged = judge(request(), [*silent, prefill("p1"), decode("d1")], {}, RATES)
    assert [score.left_out for score in judged.scores] == [*["has told no layout"] * 2, "", ""]
    assert judged.placed().placement.decode.worker_id == "d1"


def test_the_hashes_themselves_decide_nothing() -> None:
    """A stored decision keeps their digest, so a replay has to do without them."""
    fleet = [prefill("p0"), prefill("p1"), decode("d0")]
    hits = device_hit("p1", 10)

    assert place(request(), fleet, hits, RATES) == place(request(hashes=b""), fleet, hits, RATES)


SPEEDS = st.sampled_from([(0.0, 0.0), (10_000.0, 0.1), (800.0, 2.5)])


@given(st.integers(128, 200_000), st.integers(2, 8), SPEEDS, st.randoms(use_true_random=False))
@example(500, 8, (10_000.0, 0.1), random.Random(0))
@example(640, 8, (800.0, 2.5), random.Random(0))
@example(515, 8, (800.0, 2.5), random.Random(0))
@settings(max_examples=40, deadline=None)
def test_a_burst_with_one_prefix_goes_to_two_workers_at_most(
    prefix_tokens: int, num_workers: int, speed: tuple[float, float], rng: random.Random
) -> None:
    """32 arrivals before any event or heartbeat (C8), whatever speeds and steps were measured.

    Tails are up to an eighth of the prefix; were they as long as it, spreading would be right.
    """
    tokens_per_s, step_s = speed
    measured = load(tokens_per_s=tokens_per_s, step_s=step_s)
    promised = Burst(num_workers, measured)
    for _ in range(32):
        promised.place(prefix_tokens + rng.randrange(prefix_tokens // 8 + 1), prefix_tokens // 64)

    assert len(promised.used) <= 2


def test_who_holds_nearly_all_of_a_prompt_makes_no_third_copy() -> None:
    """It may be the only one that is in time: the two have just begun."""
    busy = [
        prefill(name, Promised(prefill_tokens=104_000, num_new=1), load=load(tokens_per_s=8000.0))
        for name in ("p0", "p1")
    ]
    fleet = [*busy, prefill("p2", load=load(tokens_per_s=8000.0)), decode("d0")]
    hits = {
        WorkerKey("p0", 1): Hit(1625, pb.TIER_DEVICE, is_on_the_way=True),
        WorkerKey("p1", 1): Hit(1625, pb.TIER_DEVICE, is_on_the_way=True),
        WorkerKey("p2", 1): Hit(1500, pb.TIER_DEVICE),
    }

    assert chosen(request(104_064), fleet, hits)[0] == "p2"


def test_more_than_a_burst_is_spread_again() -> None:
    """A thousand requests with one short prompt are work for all workers."""
    promised = Burst(8, load(tokens_per_s=800.0, step_s=2.5))
    for _ in range(400):
        promised.place(640, 10)

    assert len(promised.used) == 8


class Burst:
    """Requests placed within a moment: no heartbeat tells anything new."""

    def __init__(self, num_workers: int, measured: pb.Load) -> None:
        self.used: Counter[str] = Counter()
        self._clock = Clock()
        self._promises = Promises(self._clock)
        fleet = [prefill(f"p{i}", load=measured) for i in range(num_workers)]
        fleet += [decode(f"d{i}") for i in range(2)]
        self._heard = [Heard(worker.heartbeat, self._clock()) for worker in fleet]

    def place(self, num_tokens: int, num_shared_blocks: int) -> None:
        number = self.used.total() + 1
        own = num_tokens // 64 - num_shared_blocks
        hashes = chain(num_shared_blocks) + chain(own, first=10**6 * number)
        placing = request(num_tokens, request_id=str(number), hashes=hashes)
        hits = self._promises.prefixes_on_the_way(placing.block_hashes)
        decision = place(placing, self._promises.applied(self._heard), hits, RATES)
        self._promises.make(placing, decision, 600)
        self.used[decision.placement.prefill.worker_id] += 1
        self._clock.now_s += 0.0003


def test_a_burst_without_a_common_prefix_is_spread() -> None:
    """Promises count at once: nobody piles 8 prompts on the worker that was idle a moment ago."""
    clock = Clock()
    promises = Promises(clock)
    heard = [Heard(worker.heartbeat, clock()) for worker in [prefill(f"p{i}") for i in range(4)]]
    heard += [Heard(decode(f"d{i}").heartbeat, clock()) for i in range(4)]
    placed: list[tuple[str, str]] = []
    for i in range(8):
        placing = request(request_id=str(i), hashes=chain(15, first=1000 * (i + 1)))
        hits = promises.prefixes_on_the_way(placing.block_hashes)
        decision = place(placing, promises.applied(heard), hits, RATES)
        promises.make(placing, decision, 600)
        worker_ids = (decision.placement.prefill.worker_id, decision.placement.decode.worker_id)
        placed.append(worker_ids)

    for role in (0, 1):
        counts = [
            sum(ids[role] == name for ids in placed) for name in {ids[role] for ids in placed}
        ]
        assert counts == [2, 2, 2, 2]


LIMITS = st.builds(
    pb.Limits,
    max_sequence_tokens=st.sampled_from([0, 1000, 10_000, 1_048_576]),
    max_concurrent=st.integers(0, 4),
)
LOADS = st.builds(
    pb.Load,
    num_running=st.integers(0, 5),
    num_waiting=st.sampled_from([0, 1, 255, 256]),
    waiting_tokens=st.integers(0, 10**6),
    free_blocks=st.integers(0, 300),
    total_blocks=st.just(300),
    free_device_pages=st.integers(0, 2),
    total_device_pages=st.just(2),
    free_index_pages=st.integers(0, 300),
    total_index_pages=st.sampled_from([0, 300]),
    tokens_per_s=st.sampled_from([0.0, 100.0, 20_000.0]),
)
WORKERS = st.builds(
    lambda name, role, epoch, state, limits, numbers, kv_format: (prefill if role else decode)(
        f"{'p' if role else 'd'}{name}",
        epoch=epoch,
        state=state,
        limits=limits,
        load=numbers,
        layout=pb.KvLayout(kv_format=kv_format, block_tokens=64, num_mla_layers=1, row_bytes=656),
    ),
    st.integers(0, 5),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from(
        [
            pb.SERVICE_STATE_READY,
            pb.SERVICE_STATE_READY,
            pb.SERVICE_STATE_STARTING,
            pb.SERVICE_STATE_DRAINING,
        ]
    ),
    LIMITS,
    LOADS,
    st.sampled_from(["fp32", "fp8_ds_mla"]),
)
FLEETS = st.lists(WORKERS, max_size=10, unique_by=lambda worker: worker.key.worker_id)
REQUESTS = st.builds(
    request,
    st.integers(1, 12_000),
    st.integers(1, 1000),
    priority=st.integers(-3, 3),
    excluded=st.lists(
        st.builds(pb.WorkerRef, worker_id=st.sampled_from(["p0", "d0"]), epoch=st.just(1))
    ),
)
HITS = st.dictionaries(
    st.builds(WorkerKey, st.sampled_from(["p0", "p1", "d0", "d1"]), st.integers(1, 2)),
    st.builds(Hit, st.integers(1, 200), st.sampled_from([pb.TIER_DEVICE, pb.TIER_HOST])),
)


def could_hold(worker: Worker, role: pb.Role, num_tokens: int, placing: pb.PlaceRequest) -> bool:
    beat = worker.heartbeat
    return (
        beat.role == role
        and beat.model == MODEL
        and beat.state == pb.SERVICE_STATE_READY
        and beat.layout.model_fingerprint != ""
        and beat.limits.max_sequence_tokens >= num_tokens
        and beat.worker not in placing.excluded
    )


@given(REQUESTS, FLEETS, HITS, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_whoever_is_chosen_can_hold_the_request_and_the_order_does_not_matter(
    placing: pb.PlaceRequest, fleet: list[Worker], hits: Hits, rng: random.Random
) -> None:
    """And who could be chosen is: a refusal means that no pair was possible."""
    prompt_tokens = placing.num_prompt_tokens
    prefills = [w for w in fleet if could_hold(w, pb.ROLE_PREFILL, prompt_tokens, placing)]
    num_tokens = prompt_tokens + placing.max_new_tokens
    decodes = [w for w in fleet if could_hold(w, pb.ROLE_DECODE, num_tokens, placing)]
    bound = cost.max_waiting(placing, RATES)
    possible = [
        (p, d)
        for p in prefills
        for d in decodes
        if p.layout_key == d.layout_key
        and max(p.heartbeat.load.num_waiting, d.heartbeat.load.num_waiting) < bound
    ]

    try:
        placement = place(placing, fleet, hits, RATES).placement
    except FarspanError as error:
        assert isinstance(error, TooLong | Overloaded)
        assert not possible
        return

    chosen_pair = (placement.prefill, placement.decode)
    assert chosen_pair in [(p.heartbeat.worker, d.heartbeat.worker) for p, d in possible]
    assert placement.prefill_hit_tokens < prompt_tokens
    assert placement.decode_hit_tokens <= prompt_tokens
    shuffled = [replace(worker) for worker in fleet]
    rng.shuffle(shuffled)
    assert place(placing, shuffled, hits, RATES).placement == placement


@given(REQUESTS, FLEETS, HITS, st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_promises_elsewhere_do_not_change_a_choice(
    placing: pb.PlaceRequest, fleet: list[Worker], hits: Hits, num_promised: int
) -> None:
    """So a router need not decide again for them: the ledger stands on this."""
    loads = [worker.heartbeat.load for worker in fleet]
    assume(all(load.num_waiting + load.num_running or not load.waiting_tokens for load in loads))
    chosen_pair = judge(placing, fleet, hits, RATES).decision
    if chosen_pair is None:
        return
    kept = (chosen_pair.placement.prefill, chosen_pair.placement.decode)
    promised = Promised(
        prefill_tokens=1000 * num_promised,
        num_new=num_promised,
        num_requests=num_promised,
        num_pages=20 * num_promised,
        num_device_pages=num_promised,
    )

    later = [
        worker if worker.heartbeat.worker in kept else replace(worker, promised=promised)
        for worker in fleet
    ]

    placement = place(placing, later, hits, RATES).placement
    assert (placement.prefill, placement.decode) == kept
