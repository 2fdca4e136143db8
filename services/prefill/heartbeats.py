"""Tells the fleet that this worker lives, in which state, and how busy it is."""

import asyncio
from collections.abc import Callable

from shared import farspan_pb2 as pb
from shared import subjects
from shared.bus import Bus

_PERIOD_S = 0.5


class Heartbeats:
    """A heartbeat every half second and at every change of state."""

    def __init__(self, bus: Bus, worker: pb.WorkerRef, model: str) -> None:
        self.worker = worker
        self._bus = bus
        self._fixed = pb.Heartbeat(worker=worker, role=pb.ROLE_PREFILL, model=model)
        self._measure: Callable[[pb.Heartbeat], None] = lambda heartbeat: None
        self._changed = asyncio.Event()
        self.state: pb.ServiceState = pb.SERVICE_STATE_STARTING

    def describe(
        self, layout: pb.KvLayout, limits: pb.Limits, measure: Callable[[pb.Heartbeat], None]
    ) -> None:
        """From now on say also this; `measure` fills in what changes."""
        self._fixed.layout.CopyFrom(layout)
        self._fixed.limits.CopyFrom(limits)
        self._measure = measure

    def enter(self, state: pb.ServiceState) -> None:
        """Change the state and say so at once."""
        self.state = state
        self._changed.set()

    def readiness(self) -> tuple[bool, str]:
        """For the probe's thread."""
        name = pb.ServiceState.Name(self.state).removeprefix("SERVICE_STATE_").lower()
        if not self._bus.is_connected:
            return False, f"{name}, and NATS is away"
        return self.state == pb.SERVICE_STATE_READY, name

    async def beat(self) -> None:
        """For ever."""
        while True:
            self._changed.clear()
            await self.publish()
            try:
                async with asyncio.timeout(_PERIOD_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def publish(self) -> None:
        """One heartbeat now; none while NATS is away, since old ones say nothing."""
        if not self._bus.is_connected:
            return
        heartbeat = pb.Heartbeat(state=self.state)
        heartbeat.MergeFrom(self._fixed)
        self._measure(heartbeat)
        await self._bus.publish(subjects.HEARTBEAT, heartbeat)
