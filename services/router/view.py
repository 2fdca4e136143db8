"""What a decision is made from, as plain data: workers with their promises, prefix hits, rates.

Knows the meaning of a heartbeat's numbers; decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shared import farspan_pb2 as pb
from shared.layout_key import LayoutKey, layout_key


class WorkerKey(NamedTuple):
    """One life of one worker."""

    worker_id: str
    epoch: int


class Hit(NamedTuple):
    """How many leading 64-token blocks of the prompt a worker holds, the slowest in `tier`."""

    num_blocks: int
    tier: pb.Tier
    is_on_the_way: bool = False  # it is computing them for another request now


Hits = Mapping[WorkerKey, Hit]


@dataclass(frozen=True)
class Promised:
    """What placements will take from a worker beyond what its last heartbeat can know."""

    prefill_tokens: int = 0  # prompt tokens to compute, of requests it has hardly received
    num_new: int = 0  # how many requests those are
    num_requests: int = 0  # all requests placed here and not ended
    num_pages: int = 0  # decode pages of all those requests
    num_device_pages: int = 0  # and their device pages


@dataclass(frozen=True)
class Worker:
    """A worker as a decision sees it."""

    heartbeat: pb.Heartbeat
    promised: Promised = Promised()

    @cached_property
    def key(self) -> WorkerKey:
        """Which life this is."""
        return key_of(self.heartbeat.worker)

    @cached_property
    def layout_key(self) -> LayoutKey:
        """KV moves only between workers where this is equal."""
        return layout_key(self.heartbeat.layout)

    @property
    def kv_bytes_per_token(self) -> float:
        """What one token's KV weighs on the way from prefill to decode."""
        layout = self.heartbeat.layout
        latent_bytes = layout.num_mla_layers * layout.row_bytes
        index_bytes = layout.num_index_layers * layout.index_page_bytes
        return latent_bytes + index_bytes / max(1, layout.block_tokens)


@dataclass(frozen=True)
class Rates:
    """What a second buys where no worker has measured it, and how long queues may be."""

    prefill_tokens_per_s: float = 8000.0
    link_bytes_per_s: float = 5e9  # NIXL over one host's memory; an RDMA NIC does 40e9
    host_load_bytes_per_s: float = 20e9  # host tier to HBM, scattered (design.md section 4)
    pressure_s: float = 1.0  # what a completely full decode worker costs a request
    max_waiting: int = 256  # requests that may queue at one worker, whatever their priority


def key_of(worker: pb.WorkerRef) -> WorkerKey:
    """The life a reference names."""
    return WorkerKey(worker.worker_id, worker.epoch)
