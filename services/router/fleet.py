"""The fleet as the last heartbeats describe it. Knows time only through the clock it is given."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.router.view import WorkerKey, key_of
from shared import farspan_pb2 as pb
from shared.errors import BadRequest

_ROLES = (pb.ROLE_PREFILL, pb.ROLE_DECODE)
_KNOWN_STATES = (
    pb.SERVICE_STATE_STARTING,
    pb.SERVICE_STATE_READY,
    pb.SERVICE_STATE_DRAINING,
    pb.SERVICE_STATE_STOPPED,
)


@dataclass(frozen=True)
class Heard:
    """A heartbeat and when it came."""

    heartbeat: pb.Heartbeat
    at_s: float

    @property
    def key(self) -> WorkerKey:
        """Which life it came from."""
        return key_of(self.heartbeat.worker)


class Fleet:
    """The workers heard of lately: one life of each."""

    def __init__(self, clock: Callable[[], float], silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._heard: dict[str, Heard] = {}
        self._excused_at_s = float("-inf")

    def observe(self, heartbeat: pb.Heartbeat) -> None:
        """Take in a heartbeat; one of a past life changes nothing. Raises BadRequest."""
        _check(heartbeat)
        worker = heartbeat.worker
        known = self._heard.get(worker.worker_id)
        if known is not None and known.heartbeat.worker.epoch > worker.epoch:
            return
        if heartbeat.state == pb.SERVICE_STATE_STOPPED:
            self._heard.pop(worker.worker_id, None)
        else:
            self._heard[worker.worker_id] = Heard(heartbeat, self._clock())

    def excuse_silence(self) -> None:
        """Count silence from now on: it was we who could not hear."""
        self._excused_at_s = self._clock()

    def live(self) -> list[Heard]:
        """The workers that are not silent, in the order of their ids."""
        now_s = self._clock()
        for worker_id, heard in list(self._heard.items()):
            if now_s - max(heard.at_s, self._excused_at_s) > self._silence_s:
                del self._heard[worker_id]
        return [self._heard[worker_id] for worker_id in sorted(self._heard)]


def _check(heartbeat: pb.Heartbeat) -> None:
    worker = heartbeat.worker
    if not worker.worker_id or not worker.epoch:
        raise BadRequest("a heartbeat without a worker")
    if heartbeat.role not in _ROLES or heartbeat.state not in _KNOWN_STATES:
        raise BadRequest(f"a heartbeat of {worker.worker_id} without a known role and state")
    load = heartbeat.load
    for measured in (load.tokens_per_s, load.eviction_age_s, load.step_s, load.measured_age_s):
        if not 0 <= measured < math.inf:
            raise BadRequest(f"a heartbeat of {worker.worker_id} measured {measured}")
