"""One NIXL agent with the settings Farspan needs: the only nixl import.

NIXL's own progress thread spins at 100 % of a core, so progress is polled: a target calls
`progress`, an initiator polls its reads. NIXL serialises calls of several threads itself (STRICT).
What a peer causes becomes WorkerLost.
"""

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.engine.kv.layout import IntArray
from shared.errors import ConfigError, WorkerLost

logger = logging.getLogger(__name__)

StridedRange = tuple[int, int, int]  # (address of the first, bytes of each, count), back to back

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PEER_ERRORS = (
    "nixlRemoteDisconnectError",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlUnknownError",
)


@dataclass(frozen=True)
class MemoryPlace:
    """Where registered memory lies, in NIXL's words."""

    kind: str = "DRAM"  # or VRAM
    device_idx: int = 0  # VRAM: which of its owner's GPUs


HOST = MemoryPlace()


def place_of(memory: torch.Tensor) -> MemoryPlace:
    """Where the tensor lies. ConfigError for GPU memory that no other process can open."""
    if memory.device.type == "cpu":
        return HOST
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise ConfigError(f"{name} must not ask for expandable segments: KV moves out of them")
    return MemoryPlace("VRAM", memory.get_device())


def require_nixl() -> None:
    """Raise ConfigError where NIXL cannot be loaded; a worker asks before it reads a checkpoint."""
    try:
        import nixl_cu13
        import nixl_cu13._bindings  # noqa: F401  # the part that needs shared libraries
    except ImportError as error:
        raise ConfigError(
            f"KV moves over NIXL only, and nixl_cu13 cannot be imported: {error}"
        ) from error


class Read:
    """A posted read; its handle is kept until the end, since releasing it stops nothing."""

    def __init__(self, agent: "NixlAgent", handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._status = "PROC"
        self.failure: str | None = None
        self._advance(agent.nixl.transfer)

    def is_over(self) -> bool:
        """Whether nothing of it can land any more; drives progress. `failure` says how it ended."""
        if self._status == "PROC":
            self._advance(self._agent.nixl.check_xfer_state)
        return self._status != "PROC"

    def _advance(self, step: Callable[[Any], str]) -> None:
        try:
            self._status = step(self._handle)
            if self._status == "ERR":
                self.failure = "NIXL reports a failed read"
        except self._agent.peer_errors as error:
            self._status = "ERR"
            self.failure = f"{type(error).__name__}: {error}"
        if self._status != "PROC":
            self._handle.release()


class NixlAgent:
    """An agent of this process; its name is fresh, so that a restarted worker is never mistaken."""

    def __init__(self, owner: str) -> None:
        self.name = f"{owner}-{secrets.token_hex(8)}"
        require_nixl()
        import nixl_cu13._bindings as bindings
        from nixl_cu13 import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        if torch.cuda.is_available():
            # By itself UCX reads a process's GPU memory directly only where it sees NVLinks, and
            # elsewhere through TCP at 0.4 GB/s, even within one GPU.
            os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
            # Else what is mapped of a dead process's memory stays mapped, and taken, until we end.
            os.environ.setdefault("UCX_CUDA_IPC_CACHE", "n")
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its INFO lines go to stdout
        self.peer_errors: tuple[type[Exception], ...] = tuple(
            getattr(bindings, name) for name in _PEER_ERRORS
        )
        settings = nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        failures: tuple[type[Exception], ...] = (*self.peer_errors, RuntimeError)
        try:
            self.nixl: Any = nixl_agent(self.name, settings)
        except failures as error:
            raise ConfigError(
                f"no NIXL agent with UCX: {error} (see UCX_TLS and UCX_NET_DEVICES)"
            ) from error
        if "UCX" not in self.nixl.backends:
            raise ConfigError("NIXL has no UCX plug-in here")

    def register(self, memory: torch.Tensor) -> None:
        """Let peers read `memory`, and reads land in it, until the process ends."""
        assert memory.is_contiguous()
        place = place_of(memory)
        region = (memory.data_ptr(), memory.nbytes, place.device_idx, "")
        self.nixl.register_memory([region], place.kind)

    def metadata(self) -> bytes:
        """What a peer needs to reach all memory registered so far."""
        return bytes(self.nixl.get_agent_metadata())

    def progress(self) -> None:
        """Serve peers: connections and, without shared memory, their reads."""
        self.nixl.get_new_notifs()

    def add_peer(self, metadata: bytes) -> str:
        """The name of the peer whose metadata this is, now known here. Raises WorkerLost."""
        try:
            name: bytes = self.nixl.add_remote_agent(metadata)
        except self.peer_errors as error:
            raise WorkerLost(f"NIXL refuses the peer's metadata: {error}") from error
        return name.decode()

    def remove_peer(self, peer: str) -> None:
        """Unmap a dead peer's memory, for good; none of its reads may be under way."""
        try:
            self.nixl.remove_remote_agent(peer)
        except self.peer_errors:
            logger.warning("%s could not be removed, its memory stays mapped", peer, exc_info=True)

    def own_ranges(self, ranges: Sequence[StridedRange], place: MemoryPlace) -> Any:
        """Descriptors of own memory, numbered over all ranges in order."""
        return self.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", _table(ranges, place), place.kind)

    def peer_ranges(self, peer: str, ranges: Sequence[StridedRange], place: MemoryPlace) -> Any:
        """Descriptors of a peer's memory, numbered likewise. Raises WorkerLost."""
        try:
            return self.nixl.prep_xfer_dlist(peer, _table(ranges, place), place.kind)
        except self.peer_errors as error:
            raise WorkerLost(f"{peer} did not register the memory it offers: {error}") from error

    def read(self, own: Any, own_ids: IntArray, peers: Any, peer_ids: IntArray) -> Read:
        """Post a read of the peer's descriptors into own ones, pairwise.

        Neighbours on both sides are merged. Where UCX copies within a host (CMA) this blocks for
        the whole copy.
        """
        indices = own_ids.astype(np.int32), peer_ids.astype(np.int32)
        try:
            handle = self.nixl.make_prepped_xfer("READ", own, indices[0], peers, indices[1])
        except self.peer_errors as error:
            raise WorkerLost(f"NIXL cannot read the peer: {error}") from error
        return Read(self, handle)


def _table(ranges: Sequence[StridedRange], place: MemoryPlace) -> npt.NDArray[np.uint64]:
    rows = [
        (address, num_bytes, place.device_idx, num_bytes, count)
        for address, num_bytes, count in ranges
    ]
    return np.array(rows, dtype=np.uint64)
