"""Who may start: first come first served over several budgets, with bounded overtaking.

Pure; knows names of budgets and whole numbers, not what they count. All that a request will ever
need is reserved before it starts, so nothing that runs is ever preempted for room.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.errors import BadRequest, TooLong


@dataclass
class _Waiting:
    demand: Mapping[str, int]
    num_overtaken: int = 0


class AdmissionQueue:
    """Requests from arrival to release. A request leaves by `release`, whatever its state."""

    def __init__(self, totals: Mapping[str, int], *, max_overtakes: int) -> None:
        """`max_overtakes`: so many later requests may start before one that does not fit yet.

        Small requests use room that a big one cannot use alone; the bound keeps it from starving.
        """
        self._totals = dict(totals)
        self._free = dict(totals)
        self._max_overtakes = max_overtakes
        self._waiting: dict[str, _Waiting] = {}  # in order of arrival
        self._admitted: dict[str, Mapping[str, int]] = {}

    @property
    def free(self) -> Mapping[str, int]:
        """What is not reserved."""
        return self._free

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        """Requests that hold their reservation."""
        return len(self._admitted)

    def enqueue(self, request_id: str, demand: Mapping[str, int]) -> None:
        """Let a request wait. TooLong if it could never start; BadRequest if it is here already."""
        if request_id in self._waiting or request_id in self._admitted:
            raise BadRequest(f"request {request_id} is already here")
        for name, needed in demand.items():
            if needed > self._totals[name]:
                raise TooLong(f"the request needs {needed} {name}, there are {self._totals[name]}")
        self._waiting[request_id] = _Waiting(demand)

    def admit(
        self, reserve: Callable[[str], bool], is_held: Callable[[str], bool] = lambda _: False
    ) -> list[str]:
        """Start what fits, in order. `reserve` takes the real room; False means not now.

        What is held has room and waits for something else, so nobody overtakes it.
        """
        admitted = []
        passed: list[_Waiting] = []
        for request_id, waiting in list(self._waiting.items()):
            if any(earlier.num_overtaken >= self._max_overtakes for earlier in passed):
                break
            fits = self._fits(waiting.demand)
            if fits and is_held(request_id):
                continue
            if not fits or not reserve(request_id):
                passed.append(waiting)
                continue
            for earlier in passed:
                earlier.num_overtaken += 1
            del self._waiting[request_id]
            self._admitted[request_id] = waiting.demand
            self._add(waiting.demand, -1)
            admitted.append(request_id)
        return admitted

    def release(self, request_id: str) -> bool:
        """The request is over; its room is free. False if it is not known, or no longer."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        demand = self._admitted.pop(request_id, None)
        if demand is None:
            return False
        self._add(demand, 1)
        return True

    def is_admitted(self, request_id: str) -> bool:
        """Whether the request holds its reservation."""
        return request_id in self._admitted

    def _fits(self, demand: Mapping[str, int]) -> bool:
        return all(needed <= self._free[name] for name, needed in demand.items())

    def _add(self, demand: Mapping[str, int], sign: int) -> None:
        for name, needed in demand.items():
            self._free[name] += sign * needed
