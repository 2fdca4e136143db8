"""The settings of a decode worker, read from DECODE_* variables."""

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from shared.access import ANONYMOUS, Access
from shared.device_name import cuda_ordinal
from shared.engine.kv.residency import ResidencyMode


def _host_id() -> str:
    """In a container the host name is unique, so replicas need no setting."""
    return "decode-" + re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())


@dataclass(frozen=True)
class DecodeConfig:
    """What one decode rank serves, and with how much memory."""

    nats_url: str
    checkpoint: Path
    model: str = ""  # empty = the checkpoint directory's name
    worker_id: str = field(default_factory=_host_id)  # a NATS subject token, unique in the fleet
    device: str = "cpu"  # or cuda:N
    kv_format: str = "fp8_ds_mla"
    host_pool_mib: int = 1024
    device_pool_mib: int = 512
    index_pool_mib: int = 128
    hot_rows: int = 1024  # of each sequence that is not fully resident
    residency: str = ResidencyMode.MIXED.value
    max_concurrent: int = 64
    max_waiting: int = 256  # offers that may queue for room
    # NIXL reads land here before they are checked; on a GPU so much of both kinds of memory
    staging_mib: int = 64
    pull_timeout_s: float = 5.0  # of at most 4,096 tokens; a failure is told only after it
    threads: int = 1  # more of them wait for each other longer than few rows take (docs/LOG.md)
    drain_s: float = 30.0
    health_host: str = "127.0.0.1"
    health_port: int = 0
    nats: Access = ANONYMOUS  # DECODE_NATS_CREDENTIALS_FILE, _CA_FILE, _CERT_FILE, _KEY_FILE
    trace_file: Path | None = None
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.worker_id):
            raise ValueError(f"worker_id {self.worker_id!r} is not made of [A-Za-z0-9_-]")
        cuda_ordinal(self.device)  # it raises for what is no device's name
        if self.residency not in set(ResidencyMode):
            raise ValueError(f"residency is one of {', '.join(ResidencyMode)}")
        for name in ("max_concurrent", "max_waiting", "pull_timeout_s", "threads", "drain_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")

    @property
    def model_name(self) -> str:
        """The name requests carry."""
        return self.model or self.checkpoint.resolve().name
