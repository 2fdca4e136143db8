import pytest

from services.router import cost
from services.router.view import Hit, Promised, Rates
from shared import farspan_pb2 as pb
from tests.services.router.fleets import decode, load, prefill, request

RATES = Rates(
    prefill_tokens_per_s=1000, link_bytes_per_s=54_728_000, host_load_bytes_per_s=54_728e3
)


def test_prefill_costs_the_queue_and_its_own_work_twice() -> None:
    """Own work also delays whoever comes next."""
    busy = prefill("p0", Promised(prefill_tokens=500), load=load(waiting_tokens=1500))

    bid = cost.prefill_bid(request(1000), busy, Hit(5, pb.TIER_DEVICE), RATES)

    assert bid.work_tokens == 680
    assert bid.cost_s == pytest.approx(2000 / 10_000 + 2 * 680 / 10_000)


def test_longer_prompts_in_the_queue_delay_a_short_one_by_its_own_length_at_most() -> None:
    """Prefill computes what has the least left first, but for every fourth step."""
    busy = load(num_running=2, num_waiting=1, waiting_tokens=500_000)

    bid = cost.prefill_bid(request(300), prefill("p0", load=busy), None, RATES)

    assert bid.cost_s == pytest.approx((3 * 300 / 0.75 + 2 * 300) / 10_000)


def test_a_prompt_that_is_the_longest_waits_for_the_whole_queue() -> None:
    """Everybody else has less left, those on the way to the worker included."""
    busy = prefill("p0", Promised(prefill_tokens=300, num_new=1), load=load(waiting_tokens=500))

    bid = cost.prefill_bid(request(10_000), busy, None, RATES)

    assert bid.cost_s == pytest.approx((800 + 2 * 10_000) / 10_000)


def test_a_prompt_behind_others_also_waits_for_the_step_that_runs() -> None:
    """No step is interrupted, however little it computes; where nothing is queued none runs."""
    queued = load(num_running=1, waiting_tokens=100, step_s=0.2)
    told = prefill("p0", load=queued)
    on_the_way = prefill("p1", Promised(prefill_tokens=100, num_new=1), load=load(step_s=0.2))
    idle = prefill("p2", load=load(step_s=0.2))

    behind, soon_behind, alone = (
        cost.prefill_bid(request(1000), worker, None, RATES) for worker in (told, on_the_way, idle)
    )

    assert alone.cost_s == pytest.approx(2 * 0.1)
    assert behind.cost_s == soon_behind.cost_s == pytest.approx(0.2 + 0.01 + 2 * 0.1)
    assert "queue 0.210 s" in behind.figures


def test_an_average_step_is_no_reason_to_refuse_a_request() -> None:
    """The one that runs may be over in a moment."""
    busy = prefill("p0", load=load(num_running=1, waiting_tokens=100, step_s=0.2))

    bid = cost.prefill_bid(request(1000), busy, None, RATES)

    assert bid.earliest_s == pytest.approx(0.01 + 0.1)


def test_driving_out_what_was_just_used_costs_its_computing() -> None:
    """Somebody will do it again; what is old is hardly wanted again; 0 is not known."""

    def cost_s(eviction_age_s: float) -> float:
        full = prefill("p0", load=load(eviction_age_s=eviction_age_s))
        return cost.prefill_bid(request(640), full, None, RATES).cost_s

    assert cost_s(0) == pytest.approx(2 * 0.064)
    assert cost_s(1) == pytest.approx(3 * 0.064, rel=0.01)
    assert cost_s(1) > cost_s(200) > cost_s(6000)
    assert cost_s(6000) == pytest.approx(2 * 0.064, rel=0.01)


def test_a_third_copy_is_one_of_what_two_others_are_computing_now() -> None:
    """One is not enough, nor does it matter what the index knows, or the prompt is much longer."""
    known = Hit(14, pb.TIER_DEVICE)
    on_the_way, shorter = (Hit(blocks, pb.TIER_DEVICE, is_on_the_way=True) for blocks in (15, 14))

    def third(hits: list[Hit | None], hit: Hit | None, num_tokens: int = 1000) -> bool:
        shared_blocks = cost.twice_on_the_way(hits)
        return cost.makes_third_copy(request(num_tokens), shared_blocks, hit)

    assert third([None, on_the_way, shorter], None)
    assert third([None, on_the_way, shorter], Hit(10, pb.TIER_DEVICE))
    assert not third([known, on_the_way, shorter], known), "it has it already"
    assert not third([None, on_the_way, shorter], Hit(12, pb.TIER_DEVICE)), "it has nearly all"
    assert not third([None, on_the_way, shorter], shorter), "it is one of the two"
    assert not third([None, known, on_the_way], None)
    assert not third([None, on_the_way, shorter], None, num_tokens=1110)


def test_a_prefix_on_the_way_must_arrive_first() -> None:
    """However little a prompt computes itself, and whatever it would overtake."""
    busy = prefill("p0", load=load(waiting_tokens=6000, num_running=1))
    on_the_way, there = Hit(90, pb.TIER_DEVICE, is_on_the_way=True), Hit(90, pb.TIER_DEVICE)

    waits = cost.prefill_bid(request(6000), busy, on_the_way, RATES)
    overtakes = cost.prefill_bid(request(6000), busy, there, RATES)

    assert "queue 0.576 s" in waits.figures
    assert overtakes.cost_s < waits.cost_s
    assert waits.earliest_s == overtakes.earliest_s, "how far it is nobody knows"


def test_blocks_that_hold_nothing_are_taken_first_and_cost_nothing() -> None:
    """What is lost is what goes beyond them."""
    half = prefill("p0", load=load(eviction_age_s=1, empty_blocks=5))

    bid = cost.prefill_bid(request(640), half, None, RATES)

    assert "own 0.064 s, evicts 0.032 s" in bid.figures


def test_a_hit_takes_no_room_and_so_drives_nothing_out() -> None:
    """Only the blocks that are handed out anew are lost to others; an effective block is one."""
    full = prefill("p0", load=load(eviction_age_s=1))
    full.heartbeat.layout.dcp_size = 4

    bid = cost.prefill_bid(request(1000), full, Hit(9, pb.TIER_DEVICE), RATES)

    assert "own 0.042 s, evicts 0.051 s" in bid.figures


def test_the_best_measure_of_equal_workers_counts_for_all_of_them() -> None:
    """A worker with good hits computes little in a step, which makes it look slow."""
    wide = prefill("p3", load=load(tokens_per_s=40_000))
    wide.heartbeat.layout.dcp_size = 8
    fleet = [prefill("p0", load=load(tokens_per_s=3000)), prefill("p1"), wide]

    rates = cost.measured(fleet, RATES)

    assert {ranks: each.prefill_tokens_per_s for ranks, each in rates.items()} == {
        1: 10_000,
        8: 40_000,
    }
    unmeasured = [prefill("p0", load=load(tokens_per_s=0))]
    assert cost.measured(unmeasured, RATES) == {1: RATES}


def test_an_unmeasured_worker_is_taken_for_an_average_one() -> None:
    """0 tokens a second means not known, not never."""
    bid = cost.prefill_bid(request(1000), prefill("p0", load=load(tokens_per_s=0)), None, RATES)

    assert bid.cost_s == pytest.approx(2.0)


def test_a_host_hit_costs_its_loading() -> None:
    """54,728 bytes a token, as computed from the real model's layout."""
    bid = cost.prefill_bid(request(1000), prefill("p0"), Hit(5, pb.TIER_HOST), RATES)

    assert bid.cost_s == pytest.approx(2 * (680 / 10_000 + 320 / 1000))


def test_decode_costs_its_imports_and_its_pressure() -> None:
    """Queued imports share the link; the fullest pool and the batch make the pressure."""
    worker = decode(
        "d0", load=load(num_running=8, waiting_tokens=1000, free_blocks=5000, total_blocks=10_000)
    )

    bid = cost.decode_bid(request(900, 124), worker, Hit(4, pb.TIER_DEVICE), RATES)

    assert bid.num_pages == 12
    assert bid.cost_s == pytest.approx((1000 + 644) / 1000 + (5000 + 12) / 10_000 + 8 / 32)
    assert not bid.must_wait


def test_promises_and_reports_are_not_added_up() -> None:
    """Most promised requests are in the report already; the larger figure is nearer the truth."""
    tight = load(free_blocks=30, total_blocks=100, num_running=3)

    def bid(num_pages: int) -> cost.Bid:
        promised = Promised(num_requests=3, num_pages=num_pages)
        return cost.decode_bid(request(900, 124), decode("d0", promised, load=tight), None, RATES)

    assert not bid(70).must_wait
    assert not bid(84).must_wait, "16 pages are left, exactly what is needed"
    assert bid(85).must_wait


def test_a_prefill_pool_without_room_makes_the_request_wait() -> None:
    """An effective block covers a block on each rank; a hit needs no new ones."""
    sharded = prefill("p0", load=load(free_blocks=3))
    sharded.heartbeat.layout.dcp_size = 4

    assert cost.prefill_bid(request(1000), sharded, None, RATES).must_wait
    assert not cost.prefill_bid(request(1000), sharded, Hit(4, pb.TIER_DEVICE), RATES).must_wait


def test_the_queue_counts_requests_the_worker_has_not_told_of() -> None:
    """A burst must not slip below the queue's bound."""
    limits = pb.Limits(max_sequence_tokens=10**6, max_concurrent=4)
    new = Promised(num_new=3, num_requests=9)

    assert cost.num_waiting(prefill("p0", new, load=load(num_waiting=2))) == 5
    assert cost.num_waiting(decode("d0", new, load=load(num_waiting=2), limits=limits)) == 5
