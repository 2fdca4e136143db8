"""One worker's prefix cache, with the rules of the engine's allocator, on whole chains at a time.

The same decisions as `shared/engine/kv/allocator.py` (least recently used first, a chain's tail
before its head, what is referenced stays), held to it by a test; fast enough for replays because a
chain is an array. A second copy of a block, computed while the first is there, is dropped here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.placement.traces import Nodes
from benchmarks.placement.workload import Request

Changed = Callable[[int, Nodes, bool], None]  # space, nodes, whether they can be found now


@dataclass(eq=False)
class Lease:
    """The blocks of one prompt here."""

    request: Request
    num_blocks: int
    num_hit_nodes: int
    num_found: int  # leading nodes that can be found and that this lease references


@dataclass
class _Space:
    """The blocks of one play: absent, referenced, or cached since some release."""

    released: npt.NDArray[np.int32]  # number of the release that cached it; 0 = not cached
    references: npt.NDArray[np.int16]


@dataclass
class _Release:
    number: int
    at_s: float
    space: int
    nodes: Nodes  # head first


class PrefixCache:
    """Blocks for prompts, shared by content."""

    def __init__(
        self,
        num_blocks: int,
        changed: Changed = lambda *_: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.num_blocks = num_blocks
        self._changed = changed
        self._clock = clock
        self._num_unused = num_blocks
        self._num_cached = 0
        self._spaces: dict[int, _Space] = {}
        self._releases: deque[_Release] = deque()
        self._num_releases = 0

    @property
    def num_free(self) -> int:
        """Blocks a prompt can get: the unused and the cached ones."""
        return self._num_unused + self._num_cached

    @property
    def num_empty(self) -> int:
        """Those of the free blocks that hold nothing."""
        return self._num_unused

    @property
    def eviction_age_s(self) -> float:
        """For how long the cached block that goes first was not used; 0 if none is cached."""
        return self._clock() - self._oldest().at_s if self._num_cached else 0.0

    def num_hit_nodes(self, request: Request) -> int:
        """The hit a prompt would get now; its last token is computed in any case."""
        nodes = request.nodes[: (request.turn.num_tokens - 1) // request.node_tokens]
        space = self._spaces.get(request.space)
        if space is None or not len(nodes):
            return 0
        is_held = (space.released[nodes] > 0) | (space.references[nodes] > 0)
        return len(nodes) if is_held.all() else int(is_held.argmin())

    def allocate(self, request: Request, num_tokens: int) -> Lease | None:
        """Blocks for so many tokens; None, nothing taken, if they are not there."""
        space = self._space(request)
        num_hit = self.num_hit_nodes(request)
        hit = request.nodes[:num_hit]
        num_blocks = -(-num_tokens // request.node_tokens)
        num_cached_hit = int((space.references[hit] == 0).sum())
        num_new = num_blocks - num_hit
        if num_new > self.num_free - num_cached_hit:
            return None
        space.released[hit] = 0
        space.references[hit] += 1
        self._num_cached -= num_cached_hit
        if num_new > self._num_unused:
            self._evict(num_new - self._num_unused)
        self._num_unused -= num_new
        return Lease(request, num_blocks, num_hit, num_hit)

    def publish(self, lease: Lease, num_tokens: int) -> None:
        """The first num_tokens are computed: their full blocks can be found."""
        request = lease.request
        end = min(num_tokens // request.node_tokens, len(request.nodes))
        nodes = request.nodes[lease.num_found : end]
        if not len(nodes):
            return
        space = self._spaces[request.space]
        is_new = (space.released[nodes] == 0) & (space.references[nodes] == 0)
        copies = nodes[~is_new]
        self._num_cached -= int((space.references[copies] == 0).sum())
        self._num_unused += len(copies)
        space.released[copies] = 0
        space.references[nodes] += 1
        lease.num_found = end
        self._changed(request.space, nodes[is_new], True)

    def free(self, lease: Lease) -> None:
        """Give the blocks back; those that can be found stay until their room is needed."""
        space = self._spaces[lease.request.space]
        nodes = lease.request.nodes[: lease.num_found]
        self._num_unused += lease.num_blocks - lease.num_found
        space.references[nodes] -= 1
        idle = nodes[space.references[nodes] == 0]
        self._num_releases += 1
        space.released[idle] = self._num_releases
        self._num_cached += len(idle)
        self._releases.append(
            _Release(self._num_releases, self._clock(), lease.request.space, idle)
        )

    def _space(self, request: Request) -> _Space:
        space = self._spaces.get(request.space)
        if space is None:
            space = self._spaces[request.space] = _Space(
                np.zeros(request.num_nodes, np.int32), np.zeros(request.num_nodes, np.int16)
            )
        return space

    def _evict(self, num_blocks: int) -> None:
        left = num_blocks
        while left:
            oldest = self._oldest()
            gone = oldest.nodes[-left:]
            oldest.nodes = oldest.nodes[:-left]
            self._spaces[oldest.space].released[gone] = 0
            left -= len(gone)
            self._num_cached -= len(gone)
            self._num_unused += len(gone)
            self._changed(oldest.space, gone, False)

    def _oldest(self) -> _Release:
        """The earliest release that still caches something, reduced to what it still caches."""
        while True:
            oldest = self._releases[0]
            released = self._spaces[oldest.space].released
            oldest.nodes = oldest.nodes[released[oldest.nodes] == oldest.number]
            if len(oldest.nodes):
                return oldest
            self._releases.popleft()
