import pytest

from benchmarks.placement import placers
from benchmarks.placement.placers import Placer
from benchmarks.placement.replay import Replay, Run, Setup, oracle_hits
from benchmarks.placement.workload import Lanes
from tests.benchmarks.placement.plays import session

SETUP = Setup(num_workers=3, cache_tokens=12_800, node_tokens=64, num_requests=150, num_warm_up=20)


def replayed(placer: Placer) -> Run:
    plays = [session(str(i), num_turns=8) for i in range(9)]
    return Replay(SETUP, Lanes(plays, 6, seed=1), placer).to_end()


def reuse(run: Run) -> float:
    tokens = sum(seen.request.turn.num_tokens for seen in run.counted)
    return sum(seen.hit_tokens for seen in run.counted) / tokens


def test_a_replay_is_the_same_each_time() -> None:
    """Else no two policies could be compared."""
    first, second = replayed(placers.Farspan()), replayed(placers.Farspan())

    def facts(run: Run) -> list[tuple[str, str, int, float | None]]:
        return [
            (name, seen.prefill, seen.hit_tokens, seen.ttft_s) for name, seen in run.seen.items()
        ]

    assert facts(first) == facts(second)


def test_as_many_requests_count_as_were_asked_for_and_none_of_the_warm_up() -> None:
    """Cold caches at the start are nobody's merit or fault."""
    run = replayed(placers.round_robin())

    assert len(run.counted) == 150
    assert not any(seen.counts for seen in list(run.seen.values())[:20])


def test_a_first_token_takes_at_least_one_step() -> None:
    """And a turn that continues a prefix where it lies hits all of it but what is new."""
    run = replayed(placers.sticky())

    assert min(seen.ttft_s or 0 for seen in run.counted) >= 0.105


@pytest.mark.parametrize("make", [placers.round_robin, placers.least_loaded])
def test_the_policy_reuses_more_than_placing_without_looking_at_prefixes(
    make: type[Placer],
) -> None:
    """The smallest form of the promise that the benchmark measures at length."""
    assert reuse(replayed(placers.Farspan())) > 1.2 * reuse(replayed(make()))


def test_the_oracle_sees_the_same_requests_and_loses_nothing_to_placement() -> None:
    """One cache of the summed size is what a fleet is measured by."""
    run = replayed(placers.round_robin())

    possible = oracle_hits(run, SETUP)

    assert possible.keys() == run.seen.keys()
    assert sum(possible[seen.request.request_id] for seen in run.counted) > sum(
        seen.hit_tokens for seen in run.counted
    )
