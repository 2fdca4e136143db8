"""The fleet as the gateway sees it: which workers live, and what the largest of them can hold.

Pure: told of heartbeats and of the time. Chooses no worker; that is the router's.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared import farspan_pb2 as pb
from shared.layout_key import LayoutKey, layout_key

_ROLE_NAMES = ((pb.ROLE_PREFILL, "prefill"), (pb.ROLE_DECODE, "decode"))


@dataclass(frozen=True)
class _Heard:
    heartbeat: pb.Heartbeat
    at_s: float


class Fleet:
    """The last heartbeat of each worker of one model. Times are seconds of one monotonic clock."""

    def __init__(self, model: str, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._heard: dict[str, _Heard] = {}
        self._forgiven_at_s = float("-inf")

    def hear(self, heartbeat: pb.Heartbeat, now_s: float) -> None:
        """Take a heartbeat in; those of other models and of earlier epochs are ignored."""
        worker = heartbeat.worker
        known = self._heard.get(worker.worker_id)
        is_stale = known is not None and known.heartbeat.worker.epoch > worker.epoch
        if heartbeat.model == self._model and worker.epoch and not is_stale:
            self._heard[worker.worker_id] = _Heard(heartbeat, now_s)

    def forgive(self, now_s: float) -> None:
        """Count silence from now on: the gateway itself could not hear."""
        self._forgiven_at_s = now_s

    def is_lost(self, worker: pb.WorkerRef, since_s: float, now_s: float) -> bool:
        """Whether this life of a worker, relied upon since since_s, is over or silent too long."""
        known = self._heard.get(worker.worker_id)
        at_s = max(since_s, self._forgiven_at_s)
        if known is not None and known.heartbeat.worker.epoch > worker.epoch:
            return True
        if known is not None and known.heartbeat.worker.epoch == worker.epoch:
            if known.heartbeat.state == pb.SERVICE_STATE_STOPPED:
                return True
            at_s = max(at_s, known.at_s)
        return now_s - at_s > self._timeout_s

    def is_heard_after(self, at_s: float, worker: pb.WorkerRef) -> bool:
        """Whether this life of a worker, found silent at at_s, has spoken since."""
        known = self._heard.get(worker.worker_id)
        return (
            known is not None
            and known.at_s > at_s
            and known.heartbeat.worker.epoch == worker.epoch
            and known.heartbeat.state != pb.SERVICE_STATE_STOPPED
        )

    def ready(self, role: pb.Role, now_s: float) -> list[pb.Heartbeat]:
        """The last heartbeats of the workers of a role that take requests."""
        return [
            heard.heartbeat
            for heard in self._heard.values()
            if heard.heartbeat.role == role
            and heard.heartbeat.state == pb.SERVICE_STATE_READY
            and now_s - max(heard.at_s, self._forgiven_at_s) <= self._timeout_s
        ]

    def missing(self, now_s: float) -> str:
        """Why no request can be served now; empty when one can."""
        absent = [name for role, name in _ROLE_NAMES if not self.ready(role, now_s)]
        if absent:
            return f"no ready {' and no ready '.join(absent)} worker"
        if not self.max_sequence_tokens(now_s):
            return "no ready prefill and decode worker agree on model weights and KV format"
        return ""

    def max_sequence_tokens(self, now_s: float) -> int:
        """The most tokens that a pair can serve, the answer included; 0 when there is no pair.

        Prefill must hold the answer too: after a lost worker it computes what was generated.
        """
        prefill, decode = (_limits(self.ready(role, now_s)) for role, _ in _ROLE_NAMES)
        pairs = prefill.keys() & decode.keys()
        return max((min(prefill[layout], decode[layout]) for layout in pairs), default=0)

    def model_fingerprint(self, now_s: float) -> str:
        """The revision that block hashes are made for; of several, the same choice everywhere."""
        found = {beat.layout.model_fingerprint for beat in self.ready(pb.ROLE_PREFILL, now_s)}
        return min(found, default="")


def _limits(beats: Iterable[pb.Heartbeat]) -> dict[LayoutKey, int]:
    """The most that a worker of each layout holds. KV moves only between equal layouts."""
    most: dict[LayoutKey, int] = {}
    for beat in beats:
        key = layout_key(beat.layout)
        most[key] = max(most.get(key, 0), beat.limits.max_sequence_tokens)
    return most
