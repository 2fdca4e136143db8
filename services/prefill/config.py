"""The settings of a prefill worker."""

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from shared.access import ANONYMOUS, Access
from shared.block_hash import BLOCK_TOKENS
from shared.device_name import cuda_ordinal
from shared.engine.rank_messages import RankSettings

_WORKER_ID = re.compile(r"[A-Za-z0-9_-]+")


def _host_name() -> str:
    """A scaled service has no id of its own in its settings; its container's name is one."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())


@dataclass(frozen=True)
class PrefillConfig:
    """Read from PREFILL_* variables."""

    nats_url: str
    checkpoint: Path
    model: str
    worker_id: str = field(default_factory=_host_name)
    ranks: int = 1
    device: str = "cpu"  # or cuda:N: rank r computes on cuda:N+r
    interleave: int = BLOCK_TOKENS
    kv_format: str = "fp8_ds_mla"
    num_blocks: int = 1024  # of each rank's pool
    chunk_tokens: int = 1024  # of all requests in one step
    threads_per_rank: int = 0  # on the CPU; 0 = the cores shared out
    max_requests: int = 256
    lease_s: float = 30.0
    drain_s: float = 20.0
    health_host: str = "127.0.0.1"
    health_port: int = 0
    nats: Access = ANONYMOUS  # PREFILL_NATS_CREDENTIALS_FILE, _CA_FILE, _CERT_FILE, _KEY_FILE
    trace_file: Path | None = None
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        if not _WORKER_ID.fullmatch(self.worker_id):
            raise ValueError(f"worker id {self.worker_id!r} is not made of [A-Za-z0-9_-]")
        cuda_ordinal(self.device)  # it raises for what is no device's name
        if self.ranks < 1 or self.num_blocks < 1 or self.max_requests < 1:
            raise ValueError("ranks, num_blocks and max_requests must be at least 1")
        if self.interleave < 1 or BLOCK_TOKENS % self.interleave:
            raise ValueError(f"interleave {self.interleave} does not divide {BLOCK_TOKENS}")
        if self.threads_per_rank < 0 or self.lease_s <= 0 or self.drain_s < 0:
            raise ValueError("threads_per_rank, lease_s and drain_s must not be negative")

    def rank_settings(self, epoch: int) -> RankSettings:
        """What the ranks of this life are told."""
        cores = len(os.sched_getaffinity(0))
        return RankSettings(
            owner=self.worker_id,
            epoch=epoch,
            checkpoint=self.checkpoint,
            kv_format=self.kv_format,
            num_ranks=self.ranks,
            interleave=self.interleave,
            num_blocks=self.num_blocks,
            num_threads=self.threads_per_rank or max(1, cores // self.ranks),
            device=self.device,
        )
