"""What a decode worker says about itself every half second.

Reads counters that other threads write: each is one number, and a beat later it is newer.
"""

from services.decode.blocks import Blocks
from services.decode.config import DecodeConfig
from services.decode.parts import Parts
from services.decode.scheduler import Capacity, DecodeScheduler
from shared import farspan_pb2 as pb


class Report:
    """Everything a heartbeat is made of, but the state."""

    def __init__(
        self,
        config: DecodeConfig,
        parts: Parts,
        worker: pb.WorkerRef,
        capacity: Capacity,
        scheduler: DecodeScheduler,
    ) -> None:
        self._config = config
        self._parts = parts
        self._worker = worker
        self._capacity = capacity
        self._scheduler = scheduler

    @property
    def limits(self) -> pb.Limits:
        """What could ever run here."""
        longest = self._scheduler.max_sequence_tokens
        return pb.Limits(
            max_sequence_tokens=min(longest, self._parts.engine.config.max_position),
            max_concurrent=self._capacity.max_sequences,
            max_whole_pages=self._scheduler.max_whole_pages,
            leased_device_pages=self._scheduler.leased_device_pages,
        )

    def load(self, tokens_per_s: float) -> pb.Load:
        """What runs and waits now, and what is left of the three budgets."""
        free, counters = self._scheduler.free, self._parts.engine.tier.counters
        return pb.Load(
            num_running=len(self._scheduler.batch()),
            num_waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.unimported_tokens,
            free_blocks=free.host_pages,
            total_blocks=self._capacity.host_pages,
            free_device_pages=free.device_pages,
            total_device_pages=self._capacity.device_pages,
            free_index_pages=free.index_pages,
            total_index_pages=self._capacity.index_pages,
            tokens_per_s=tokens_per_s,
            hot_hits=sum(counter.hits for counter in counters),
            hot_misses=sum(counter.misses for counter in counters),
            host_read_bytes=sum(counter.host_bytes for counter in counters),
            kv_bytes_moved=self._parts.importer.counts.num_bytes,
        )

    def heartbeat(
        self, state: pb.ServiceState, blocks: Blocks, tokens_per_s: float
    ) -> pb.Heartbeat:
        """The message."""
        heartbeat = pb.Heartbeat(
            worker=self._worker,
            role=pb.ROLE_DECODE,
            state=state,
            model=self._config.model_name,
            layout=self._parts.layout,
            limits=self.limits,
            load=self.load(tokens_per_s),
        )
        blocks.describe(heartbeat)
        return heartbeat
