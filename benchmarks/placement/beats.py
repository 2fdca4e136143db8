"""Heartbeats as a router has them: the state of up to half a second ago.

State changes only at events, so a heartbeat is taken just before the first change after its time.
"""

import math
from collections.abc import Callable

from services.router.fleet import Heard
from shared import farspan_pb2 as pb

PERIOD_S = 0.5


class Beats:
    """One worker's heartbeats. Ask before each change, and when a placement looks."""

    def __init__(self, phase_s: float, fixed: pb.Heartbeat, load: Callable[[], pb.Load]) -> None:
        self._phase_s = phase_s
        self._fixed = fixed
        self._load = load
        self._number = -1
        self._heard = Heard(self._with_load(), 0.0)

    def until(self, now_s: float) -> Heard:
        """The last heartbeat up to now."""
        number = math.floor((now_s - self._phase_s) / PERIOD_S)
        if number > self._number:
            self._number = number
            self._heard = Heard(self._with_load(), self._phase_s + number * PERIOD_S)
        return self._heard

    def _with_load(self) -> pb.Heartbeat:
        heartbeat = pb.Heartbeat()
        heartbeat.CopyFrom(self._fixed)
        heartbeat.load.CopyFrom(self._load())
        return heartbeat


def fixed_part(
    worker_id: str, role: pb.Role, node_tokens: int, max_concurrent: int
) -> pb.Heartbeat:
    """What a worker of GLM-5.3's layout says of itself for ever."""
    return pb.Heartbeat(
        worker=pb.WorkerRef(worker_id=worker_id, epoch=1),
        role=role,
        state=pb.SERVICE_STATE_READY,
        model="glm-5.3",
        layout=pb.KvLayout(
            model_fingerprint="glm-5.3",
            kv_format="fp8_ds_mla",
            block_tokens=64,
            dcp_size=node_tokens // 64 if role == pb.ROLE_PREFILL else 1,
            interleave=64,
            num_mla_layers=79,
            num_index_layers=22,
            row_bytes=656,
            index_page_bytes=8448,
        ),
        limits=pb.Limits(max_sequence_tokens=1_048_576, max_concurrent=max_concurrent),
    )
