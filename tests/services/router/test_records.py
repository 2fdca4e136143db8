import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router import records
from services.router.records import Inputs
from services.router.view import Hit, Promised, Rates, Worker, WorkerKey
from shared import farspan_pb2 as pb
from tests.services.router.fleets import chain, decode, load, prefill, request

LOADS = st.builds(
    lambda **values: load(**values),
    num_waiting=st.integers(0, 300),
    waiting_tokens=st.integers(0, 10**6),
    free_blocks=st.integers(0, 20_000),
    free_device_pages=st.integers(0, 1000),
    tokens_per_s=st.floats(0, 1e6, width=32),
)
PROMISED = st.builds(
    Promised,
    prefill_tokens=st.integers(0, 10**7),
    num_new=st.integers(0, 100),
    num_requests=st.integers(0, 100),
    num_pages=st.integers(0, 10**5),
    num_device_pages=st.integers(0, 10**4),
)
WORKERS = st.lists(
    st.builds(
        lambda kind, number, promised, numbers: kind(
            f"{kind.__name__}-{number}", promised, load=numbers
        ),
        st.sampled_from([prefill, decode]),
        st.integers(0, 5),
        PROMISED,
        LOADS,
    ),
    max_size=8,
    unique_by=lambda worker: worker.key.worker_id,
)
HITS = st.dictionaries(
    st.builds(WorkerKey, st.sampled_from(["prefill-0", "prefill-1", "decode-0"]), st.just(1)),
    st.builds(Hit, st.integers(1, 200), st.sampled_from([pb.TIER_DEVICE, pb.TIER_HOST])),
)
RATES = st.builds(
    Rates,
    prefill_tokens_per_s=st.floats(1, 1e6),
    link_bytes_per_s=st.floats(1, 1e12),
    max_waiting=st.integers(0, 1000),
)


def seen(workers: Sequence[Worker] | None = None, placing: pb.PlaceRequest | None = None) -> Inputs:
    bare, digest = records.without_hashes(placing or request(known_as=["chatcmpl-1"]))
    fleet = [prefill("p0"), prefill("p1", load=load(waiting_tokens=77)), decode("d0")]
    hits = {WorkerKey("p1", 1): Hit(7, pb.TIER_HOST)}
    return Inputs(bare, digest, fleet if workers is None else workers, hits, Rates(), 59.9)


def stored(inputs: Inputs) -> pb.DecisionRecord:
    """Through the file and back."""
    message = records.record("router-a", 1_796_026_266_032, inputs, records.judge(inputs))
    line = json.dumps(json_format.MessageToDict(message))
    parsed: pb.DecisionRecord = json_format.ParseDict(json.loads(line), pb.DecisionRecord())
    return parsed


@given(WORKERS, HITS, RATES, st.integers(-3, 3), st.floats(0.001, 1e5) | st.just(math.inf))
@settings(max_examples=60, deadline=None)
def test_a_stored_decision_replays_bit_for_bit(
    workers: list[Worker],
    hits: dict[WorkerKey, Hit],
    rates: Rates,
    priority: int,
    lifetime_s: float,
) -> None:
    """Refusals too; every score counts, whatever the floats are."""
    bare, digest = records.without_hashes(request(9000, priority=priority))
    inputs = Inputs(bare, digest, workers, hits, rates, lifetime_s)

    parsed = stored(inputs)

    assert records.first_difference(parsed.outcome, records.replay(parsed)) == ""
    original = records.record("router-a", 0, inputs, records.judge(inputs)).outcome
    assert parsed.outcome.SerializeToString(deterministic=True) == original.SerializeToString(
        deterministic=True
    )


def test_a_record_tells_inputs_scores_and_reason() -> None:
    """Who asks why gets the whole answer."""
    record = stored(seen())

    assert record.inputs.request.known_as == ["chatcmpl-1"]
    assert record.inputs.hits[0].num_blocks == 7
    assert [score.worker.worker_id for score in record.outcome.scores] == ["p0", "p1", "d0"]
    assert record.outcome.scores[1].hit_tokens == 448
    assert record.outcome.scores[0].cost_s > record.outcome.scores[1].cost_s > 0
    assert record.outcome.placement.prefill.worker_id == "p1"
    assert "hit 448 tokens" in record.outcome.placement.reason


def test_a_refusal_is_recorded_with_its_reasons() -> None:
    workers = [prefill("p0", state=pb.SERVICE_STATE_DRAINING), decode("d0")]

    outcome = stored(seen(workers)).outcome

    assert outcome.failure.kind == pb.FAILURE_KIND_OVERLOADED
    assert [score.left_out for score in outcome.scores] == ["is not ready", "not asked"]


def test_a_request_that_came_too_late_is_recorded_and_replays() -> None:
    """Nobody is asked; that it was refused, and why, is found like any decision."""
    record = stored(replace(seen(), lifetime_s=-0.5))

    assert record.outcome.failure.kind == pb.FAILURE_KIND_DEADLINE
    assert {score.left_out for score in record.outcome.scores} == {"not asked"}
    assert records.first_difference(record.outcome, records.replay(record)) == ""


def test_no_prompt_content_is_kept() -> None:
    """Hashes of a short, guessable block could be searched for; a digest of all of them not."""
    placing = request(640)
    record = stored(seen(placing=placing))

    assert not record.inputs.request.block_hashes
    assert len(record.inputs.prefix_digest) == 16
    assert chain(1) not in record.SerializeToString()
    assert placing.block_hashes, "the caller's request is as it was"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.outcome.placement.prefill.__setattr__("worker_id", "p9"), "placement"),
        (lambda r: r.outcome.scores[1].__setattr__("cost_s", 9.25), "scores[1].cost_s: 9.25, then"),
        (lambda r: r.outcome.scores.pop(), "scores: 2, then 3"),
        (lambda r: r.outcome.reservation.__setattr__("decode_pages", 1), "reservation.decode_page"),
    ],
)
def test_the_first_difference_is_named(change: object, said: str) -> None:
    """A policy that has changed shows where."""
    record = stored(seen())
    change(record)  # type: ignore[operator]

    assert records.first_difference(record.outcome, records.replay(record)).startswith(said)


def test_everything_a_decision_is_made_from_has_its_place_in_the_record() -> None:
    """A figure added to the view and not to the record would replay as zero."""
    promised = {field.name for field in dataclasses.fields(Promised)}

    assert promised == {field.name for field in pb.Promised.DESCRIPTOR.fields}
    assert set(stored(seen()).inputs.rates) == {field.name for field in dataclasses.fields(Rates)}
