"""The step thread: the only one that touches the engine.

Between steps it obeys commands; sequences join and leave at any step. The next token is decided
here, so a step never waits for the event loop. Knows sequences by request id, not their requests.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from services.decode.answer import Answer
from services.decode.pace import Pace
from shared import farspan_pb2 as pb
from shared import lifecycle
from shared.engine.decode_step import DecodeEngine, DecodeOutput, DecodeRow, hidden_from_bytes
from shared.engine.kv.fetch_plan import GroupCounters
from shared.engine.kv.page_residency import PagedSequence
from shared.engine.step import Sampling
from shared.errors import FarspanError, WorkerLost

logger = logging.getLogger(__name__)

_Row = DecodeRow[PagedSequence]

# What the engine raises when a step's tokens must not be used.
_StepError = (FloatingPointError, RuntimeError)
# So many steps without one token are no sequence's fault, whoever is alone in them.
_FAILED_STEPS = 3
_HUNG_S = 30.0  # a step that is not over so long after the end was asked for never will be


@dataclass(frozen=True)
class Begin:
    """A sequence whose prompt's KV is complete."""

    request_id: str
    token_id: int  # the newest token, not cached yet
    position: int
    last_hidden: bytes  # of the token before it
    answer: Answer  # the step thread's from now on


@dataclass(frozen=True)
class Produced:
    """A step has cached a sequence's newest token and drawn the next."""

    request_id: str
    token_id: int
    finish: pb.FinishReason | None  # why the answer ends with this token
    logprobs: pb.TokenLogprobs | None = None


@dataclass(frozen=True)
class Broken:
    """A sequence that cannot go on; nothing of its last step may be used."""

    request_id: str
    error: FarspanError


Result = Produced | Broken


@dataclass
class _Running:
    position: int  # of the newest token, which is not cached yet
    row: Callable[[Sampling], _Row]  # how a token is drawn is decided just before the step
    answer: Answer


class _Command:
    def __init__(self, run: Callable[[], None]) -> None:
        self.done: Future[None] = Future()
        self._run = run

    def execute(self) -> None:
        try:
            self._run()
        except WorkerLost as error:  # nothing can be computed here any more
            self.done.set_exception(error)
            raise
        except Exception as error:
            self.done.set_exception(error)  # whoever asked decides what it means
        else:
            self.done.set_result(None)


class StepThread:
    """Runs steps while inside its `with`; its methods are called from the event loop.

    `deliver` gets each step's results, on the step thread.
    """

    def __init__(self, engine: DecodeEngine[Any], deliver: Callable[[list[Result]], None]) -> None:
        self.ended: Future[None] = Future()  # carries the error that stopped the thread
        self._engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._sequences: dict[str, PagedSequence] = {}
        self._running: dict[str, _Running] = {}
        self._is_stopping = False
        self._num_failed = 0  # steps in a row that gave nobody a token
        self._step_began_s: float | None = None  # monotonic, of the one under way
        self._pace = Pace()
        self._thread = threading.Thread(target=self._run, name="steps")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._command(self._stop)
        self._thread.join(_HUNG_S)
        if self._thread.is_alive():
            # It waits for a device that does not answer, and cannot be ended alone.
            logger.critical("a step does not end: the process does")
            os._exit(lifecycle.EXIT_FAILED)

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together, while steps ran; 0 before the first."""
        return self._pace.tokens_per_s

    @property
    def step_s(self) -> float:
        """How long the step under way has taken; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def counters(self) -> Sequence[GroupCounters]:
        """What selections have cost since start, for each group of layers."""
        counters: Sequence[GroupCounters] = self._engine.tier.counters
        return counters

    def open(self, request_id: str, block_ids: Sequence[int], num_shared: int) -> Future[None]:
        """Done when the blocks' old content is forgotten: then they may be written to."""

        def run() -> None:
            sequence = self._engine.tier.open(block_ids, num_shared)
            self._sequences[request_id] = sequence

        return self._command(run)

    def begin(self, begin: Begin) -> Future[None]:
        """Let an opened sequence take part in the steps. ValueError for a hidden of other width."""

        def run() -> None:
            hidden = hidden_from_bytes(begin.last_hidden, self._engine.config.hidden_size)
            sequence = self._sequences[begin.request_id]
            row = partial(DecodeRow, sequence, begin.token_id, begin.position, hidden)
            self._running[begin.request_id] = _Running(begin.position, row, begin.answer)

        return self._command(run)

    def close(self, request_id: str) -> Future[None]:
        """Done when no step reads or writes the sequence's blocks any more; in any state."""

        def run() -> None:
            self._running.pop(request_id, None)
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                self._engine.tier.close(sequence)

        return self._command(run)

    def check_integrity(self) -> Future[None]:
        """AssertionError if the tiers have lost a page. For tests and idle moments."""
        return self._command(self._engine.tier.check_integrity)

    def _command(self, run: Callable[[], None]) -> Future[None]:
        command = _Command(run)
        self._commands.put(command)
        if self.ended.done():  # nobody will come for it
            self._refuse_commands()
        return command.done

    def _refuse_commands(self) -> None:
        for command in self._waiting():
            command.done.set_exception(WorkerLost("the step thread has ended"))

    def _waiting(self) -> Iterator[_Command]:
        with suppress(queue.Empty):
            while True:
                yield self._commands.get_nowait()

    def _stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._obey()
                if self._running and not self._is_stopping:
                    self._deliver(self._step())
        except BaseException as error:
            logger.exception("the step thread failed")
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        self._refuse_commands()

    def _obey(self) -> None:
        """Run the commands that wait; without sequences, wait for one."""
        if not self._running:
            self._commands.get().execute()
        for command in self._waiting():
            command.execute()

    def _step(self) -> list[Result]:
        rows, refused = self._rows()
        if not rows:
            return refused
        begun_s = time.monotonic()
        self._step_began_s = begun_s
        outputs = self._outputs([row for _, row in rows])
        self._step_began_s = None
        self._pace.note(len(rows), time.monotonic() - begun_s)
        ids = [request_id for request_id, _ in rows]
        return refused + [self._take(*pair) for pair in zip(ids, outputs, strict=True)]

    def _rows(self) -> tuple[list[tuple[str, _Row]], list[Result]]:
        rows: list[tuple[str, _Row]] = []
        refused: list[Result] = []
        for request_id, running in list(self._running.items()):
            try:
                rows.append((request_id, running.row(running.answer.next_sampling())))
            except FarspanError as error:  # its grammar allows nothing
                refused.append(self._broken(request_id, error))
        return rows, refused

    def _outputs(self, rows: Sequence[_Row]) -> list[DecodeOutput | BaseException]:
        try:
            return [*self._engine.step(rows)]
        except _StepError as error:
            logger.exception("a step of %d sequences failed", len(rows))
            if len(rows) > 1:
                return self._one_by_one(rows)
            self._num_failed += 1
            if self._num_failed == _FAILED_STEPS:
                raise
            return [error]

    def _one_by_one(self, rows: Sequence[_Row]) -> list[DecodeOutput | BaseException]:
        """Steps may be repeated: each sequence alone, to see whose fault it was."""
        outputs: list[DecodeOutput | BaseException] = []
        failures: list[Exception] = []
        for row in rows:
            try:
                outputs += self._engine.step([row])
            except _StepError as error:
                outputs.append(error)
                failures.append(error)
        if len(failures) == len(rows):  # nobody's in particular
            raise failures[0]
        return outputs

    def _take(self, request_id: str, output: DecodeOutput | BaseException) -> Result:
        if isinstance(output, BaseException):
            error = FarspanError(f"the engine refused the step: {output}")
            return self._broken(request_id, error)
        self._num_failed = 0
        running = self._running[request_id]
        try:
            finish = running.answer.add(output.token_id)
        except FarspanError as error:
            return self._broken(request_id, error)
        if finish is None:
            sequence = self._sequences[request_id]
            running.position += 1
            running.row = partial(
                DecodeRow, sequence, output.token_id, running.position, output.hidden
            )
        else:
            del self._running[request_id]
        return Produced(request_id, output.token_id, finish, output.logprobs)

    def _broken(self, request_id: str, error: FarspanError) -> Broken:
        del self._running[request_id]
        return Broken(request_id, error)
