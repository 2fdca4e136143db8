"""Which prefill workers are alive, as far as their heartbeats say.

While a handoff waits for chunks only this tells a slow worker from a dead one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared import farspan_pb2 as pb

_SILENCE_S = 3.0  # six heartbeats


@dataclass
class _Seen:
    epoch: int
    at_s: float
    is_stopped: bool = False


class Prefills:
    """The latest life of each prefill worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def observe(self, heartbeat: pb.Heartbeat) -> None:
        """Note a sign of life; other roles' are ignored."""
        if heartbeat.role == pb.ROLE_PREFILL:
            self.note(heartbeat.worker)
            if heartbeat.state == pb.SERVICE_STATE_STOPPED:
                self._seen[heartbeat.worker.worker_id].is_stopped = True

    def note(self, worker: pb.WorkerRef) -> None:
        """This life of the worker has just said something."""
        seen = self._seen.get(worker.worker_id)
        if seen is None or worker.epoch > seen.epoch:
            self._seen[worker.worker_id] = _Seen(worker.epoch, self._clock())
        elif worker.epoch == seen.epoch:
            seen.at_s = self._clock()

    def excuse_silence(self) -> None:
        """We could not hear anybody: nobody is dead because of it."""
        for seen in self._seen.values():
            seen.at_s = self._clock()

    def is_lost(self, worker: pb.WorkerRef) -> bool:
        """Whether this life of the worker has ended, or fallen silent."""
        seen = self._seen.get(worker.worker_id)
        if seen is None or seen.epoch < worker.epoch:
            return False  # nothing is known yet
        return (
            seen.epoch > worker.epoch or seen.is_stopped or self._clock() - seen.at_s > _SILENCE_S
        )
