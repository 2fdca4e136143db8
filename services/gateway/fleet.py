"""The fleet as the gateway sees it: which workers live, and what the largest of them can hold.

Pure: told of heartbeats and of the time. Chooses no worker; that is the router's.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared import farspan_pb2 as pb
from shared.layout_key import LayoutKey, layout_key

_ROLE_NAMES = ((pb.ROLE_PREFILL, "prefill"), (pb.ROLE_DECODE, "decode"))
_SHOWN_S = 60.0  # a silent worker is shown so long: a person wants to see who has gone


@dataclass(frozen=True)
class Pool:
    """One of a worker's pools, in its own blocks or pages."""

    name: str
    free: int
    total: int


@dataclass(frozen=True)
class WorkerView:
    """A worker as people see it."""

    id: str
    role: str
    state: str  # its own word, or "silent"
    model: str
    heard_s_ago: float
    running: int
    waiting: int
    waiting_tokens: int
    tokens_per_s: float  # 0 = not known yet
    pools: list[Pool]


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

    def view(self, now_s: float) -> list[WorkerView]:
        """The workers heard of in the last minute, prefill first, by name."""
        shown = [
            (heard.heartbeat, now_s - heard.at_s)
            for heard in self._heard.values()
            if now_s - heard.at_s <= _SHOWN_S
        ]
        shown.sort(key=lambda each: (each[0].role, each[0].worker.worker_id))
        return [_view(beat, ago_s, ago_s > self._timeout_s) for beat, ago_s in shown]

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


def _view(beat: pb.Heartbeat, ago_s: float, is_silent: bool) -> WorkerView:
    load = beat.load
    state = pb.ServiceState.Name(beat.state).removeprefix("SERVICE_STATE_").lower()
    return WorkerView(
        id=beat.worker.worker_id,
        role=dict(_ROLE_NAMES).get(beat.role, "unknown"),
        state="silent" if is_silent else state,
        model=beat.model,
        heard_s_ago=round(ago_s, 3),
        running=load.num_running,
        waiting=load.num_waiting,
        waiting_tokens=load.waiting_tokens,
        tokens_per_s=round(load.tokens_per_s, 1),
        pools=_pools(beat),
    )


def _pools(beat: pb.Heartbeat) -> list[Pool]:
    """Those that the worker has."""
    load = beat.load
    first = "blocks" if beat.role == pb.ROLE_PREFILL else "host pages"
    pools = (
        Pool(first, load.free_blocks, load.total_blocks),
        Pool("device pages", load.free_device_pages, load.total_device_pages),
        Pool("index pages", load.free_index_pages, load.total_index_pages),
    )
    return [pool for pool in pools if pool.total]
