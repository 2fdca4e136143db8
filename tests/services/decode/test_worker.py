"""The step thread, over an engine that fails where it is told to."""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.decode.worker import Begin, Broken, Produced, Result, StepThread
from shared import farspan_pb2 as pb
from shared.engine.decode_step import DecodeOutput
from shared.errors import WorkerLost
from tests.services.decode.answers import answer_of

TIMEOUT_S = 5.0


class FakeEngine:
    """Draws each sequence's position as its next token; sequences are their block ids."""

    def __init__(self, *, broken: set[int] = frozenset(), error: Exception | None = None) -> None:  # type: ignore[assignment]
        self.config = SimpleNamespace(hidden_size=2)
        self.tier = self
        self.counters: list[Any] = []
        self.open_blocks: list[Sequence[int]] = []
        self._broken = broken
        self._error = error or FloatingPointError("the model's logits are not finite")

    def open(self, block_ids: Sequence[int], num_shared: int) -> Sequence[int]:
        self.open_blocks.append(block_ids)
        return block_ids

    def close(self, sequence: Sequence[int]) -> None:
        self.open_blocks.remove(sequence)

    def step(self, rows: Sequence[Any]) -> list[Any]:
        if any(row.sequence[0] in self._broken for row in rows):
            raise self._error
        return [DecodeOutput(row.position, row.previous_hidden) for row in rows]


class Results:
    """What the thread has delivered."""

    def __init__(self) -> None:
        self._batches: queue.Queue[list[Result]] = queue.Queue()

    def __call__(self, results: list[Result]) -> None:
        self._batches.put(results)

    def until(self, count: int) -> list[Result]:
        found: list[Result] = []
        while len(found) < count:
            found += self._batches.get(timeout=TIMEOUT_S)
        return found


def begin(thread: StepThread, name: str, block: int, length: int = 3) -> Future[None]:
    thread.open(name, [block], 0)
    answer = answer_of(pb.SamplingParams(), longest=length)
    answer.add(0)
    return thread.begin(Begin(name, 0, 10, np.zeros(2, np.float32).tobytes(), answer))


def test_a_sequence_runs_until_its_answer_ends() -> None:
    results = Results()
    engine = FakeEngine()
    with StepThread(engine, results) as thread:  # type: ignore[arg-type]
        begin(thread, "a", 1)

        assert results.until(2) == [
            Produced("a", 10, None),
            Produced("a", 11, pb.FINISH_REASON_LENGTH),
        ]
        thread.close("a").result(TIMEOUT_S)
        assert not engine.open_blocks
        assert thread.tokens_per_s > 0


def test_a_failing_sequence_ends_alone() -> None:
    """Each is stepped by itself to see whose fault it was; the others lose nothing."""
    results = Results()
    with StepThread(FakeEngine(broken={2}), results) as thread:  # type: ignore[arg-type]
        begin(thread, "good", 1, length=400)
        begin(thread, "bad", 2)
        found = results.until(399 + 1)

        assert [r.request_id for r in found if isinstance(r, Broken)] == ["bad"]
        assert [r.token_id for r in found if isinstance(r, Produced)] == list(range(10, 409))


def test_a_failure_of_all_ends_the_thread_and_what_waits_for_it() -> None:
    """It is nobody's in particular: the process had better end."""
    thread = StepThread(FakeEngine(broken={1, 2}), Results())  # type: ignore[arg-type]
    begin(thread, "a", 1)
    begin(thread, "b", 2)

    with thread:
        assert isinstance(thread.ended.exception(TIMEOUT_S), FloatingPointError)
        with pytest.raises(WorkerLost):
            thread.close("a").result(TIMEOUT_S)


def test_failures_in_a_row_are_no_sequences_fault() -> None:
    """Whoever is alone in a step would be blamed for a device that computes nothing any more."""
    results = Results()
    thread = StepThread(FakeEngine(broken={1}), results)  # type: ignore[arg-type]
    with thread:
        for name in ("a", "b"):
            begin(thread, name, 1)
            assert [type(result) for result in results.until(1)] == [Broken]
        begin(thread, "good", 2, length=2)
        results.until(1)
        for name in ("c", "d", "e"):
            assert not thread.ended.done()
            begin(thread, name, 1)
            if name != "e":
                results.until(1)

        assert isinstance(thread.ended.exception(TIMEOUT_S), FloatingPointError)


def test_a_command_that_meets_a_lost_device_ends_the_thread() -> None:
    """Else an idle worker would refuse request after request, and look like the best one."""
    engine = FakeEngine()

    def lost(*_: object) -> Sequence[int]:
        raise WorkerLost("cuda:0 is lost")

    engine.open = lost  # type: ignore[method-assign]
    with StepThread(engine, Results()) as thread:  # type: ignore[arg-type]
        with pytest.raises(WorkerLost):
            thread.open("a", [1], 0).result(TIMEOUT_S)

        assert isinstance(thread.ended.exception(TIMEOUT_S), WorkerLost)


def test_the_age_of_a_step_is_told_while_it_runs() -> None:
    engine, going_on = FakeEngine(), threading.Event()
    compute = engine.step

    def slow(rows: Sequence[Any]) -> list[Any]:
        going_on.wait(TIMEOUT_S)
        return compute(rows)

    engine.step = slow  # type: ignore[method-assign]
    results = Results()
    with StepThread(engine, results) as thread:  # type: ignore[arg-type]
        assert thread.step_s == 0
        begin(thread, "a", 1, length=2).result(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while thread.step_s == 0:
            assert time.monotonic() < deadline
        going_on.set()
        results.until(1)
        assert thread.step_s == 0


def test_an_error_nobody_expects_ends_the_thread() -> None:
    """A bug is not one request's failure."""
    engine = FakeEngine(broken={1}, error=KeyError("bug"))
    thread = StepThread(engine, Results())  # type: ignore[arg-type]
    begin(thread, "a", 1)

    with thread:
        assert isinstance(thread.ended.exception(TIMEOUT_S), KeyError)


def test_a_command_that_fails_is_its_sender_s_problem() -> None:
    with StepThread(FakeEngine(), Results()) as thread:  # type: ignore[arg-type]
        answer = answer_of(pb.SamplingParams())
        thread.open("a", [1], 0)

        with pytest.raises(ValueError, match="hidden state"):
            thread.begin(Begin("a", 0, 10, bytes(4), answer)).result(TIMEOUT_S)
