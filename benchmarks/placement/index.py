"""What kv_index would say: every worker's blocks, as late as its events arrive."""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.placement.cache import Changed
from benchmarks.placement.traces import Nodes
from benchmarks.placement.workload import Request
from services.router.view import Hit, WorkerKey
from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS

DELAY_S = 0.02  # a step's events over NATS into the index, and a little


class LateIndex:
    """Which worker holds which nodes; presence in a chain is monotone, so the first gap ends it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[tuple[WorkerKey, int], npt.NDArray[np.bool_]] = {}
        self._keys: list[WorkerKey] = []
        self._pending: deque[tuple[float, WorkerKey, int, Nodes, bool]] = deque()

    def follower(self, worker_id: str) -> Changed:
        """Where a worker's cache tells its changes."""
        key = WorkerKey(worker_id, 1)
        self._keys.append(key)

        def changed(space: int, nodes: Nodes, is_held: bool) -> None:
            self._pending.append((self._clock() + DELAY_S, key, space, nodes, is_held))

        return changed

    def hits(self, request: Request) -> dict[WorkerKey, Hit]:
        """Every worker that holds leading blocks of the prompt, as far as was heard."""
        self._catch_up()
        hits = {}
        per_node = request.node_tokens // BLOCK_TOKENS
        for key in self._keys:
            held = self._held.get((key, request.space))
            if held is None or not len(request.nodes) or len(held) <= request.nodes[0]:
                continue
            nodes = request.nodes[request.nodes < len(held)]
            is_held = held[nodes]
            num_nodes = len(nodes) if is_held.all() else int(is_held.argmin())
            if num_nodes:
                hits[key] = Hit(num_nodes * per_node, pb.TIER_DEVICE)
        return hits

    def _catch_up(self) -> None:
        now_s = self._clock()
        while self._pending and self._pending[0][0] <= now_s:
            _, key, space, nodes, is_held = self._pending.popleft()
            held = self._held.get((key, space))
            size = int(nodes.max(initial=0)) + 1
            if held is None or len(held) < size:
                grown = np.zeros(max(size, 2 * len(held) if held is not None else 0), np.bool_)
                if held is not None:
                    grown[: len(held)] = held
                self._held[key, space] = held = grown
            held[nodes] = is_held
