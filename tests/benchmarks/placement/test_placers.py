from collections.abc import Mapping

from benchmarks.placement import placers
from benchmarks.placement.placers import Placer
from services.router.view import Hit, Worker, WorkerKey
from shared import farspan_pb2 as pb
from tests.benchmarks.placement import plays
from tests.services.router import fleets
from tests.services.router.fleets import decode, load, prefill

REQUEST = plays.request(list(range(100)))
MESSAGE = fleets.request(REQUEST.turn.num_tokens)


def chosen(
    placer: Placer, fleet: list[Worker], hits: Mapping[WorkerKey, Hit] | None = None
) -> tuple[str, str]:
    placement = placer.place(REQUEST, MESSAGE, fleet, hits or {}).placement
    return placement.prefill.worker_id, placement.decode.worker_id


def fleet(**of_p1: float) -> list[Worker]:
    return [prefill("p0"), prefill("p1", load=load(**of_p1)), decode("d0"), decode("d1")]


def test_round_robin_takes_turns() -> None:
    """In both roles."""
    placer = placers.round_robin()

    pairs = [chosen(placer, fleet()) for _ in range(3)]

    assert pairs == [("p0", "d0"), ("p1", "d1"), ("p0", "d0")]


def test_least_loaded_looks_at_work_alone() -> None:
    """Not at hits."""
    hits = {WorkerKey("p1", 1): Hit(99, pb.TIER_DEVICE)}

    assert chosen(placers.least_loaded(), fleet(waiting_tokens=10), hits)[0] == "p0"


def test_sticky_always_chooses_alike() -> None:
    """Whatever the load."""
    assert chosen(placers.sticky(), fleet()) == chosen(
        placers.sticky(), fleet(waiting_tokens=10**6, num_running=99)
    )


def test_the_weighted_scorer_adds_prefix_three_queue_two_and_room_two() -> None:
    """The published defaults: a whole hit outweighs the longest queue, half of one does not."""
    busy = fleet(num_running=5)
    whole, half = ({WorkerKey("p1", 1): Hit(n, pb.TIER_DEVICE)} for n in (100, 50))

    assert chosen(placers.weighted(1), busy, whole)[0] == "p1"
    assert chosen(placers.weighted(1), busy, half)[0] == "p0"
    full = fleet(free_blocks=0, total_blocks=100)
    assert chosen(placers.weighted(1), full, half)[0] == "p0"


def test_the_routers_own_policy_is_what_runs() -> None:
    """The replay measures what is served."""
    decision = placers.Farspan().place(REQUEST, MESSAGE, fleet(), {})

    assert "queue" in decision.placement.reason
