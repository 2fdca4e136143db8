"""The settings of kv_index."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KvIndexConfig:
    """Read from KV_INDEX_* variables."""

    nats_url: str
    redis_url: str
    grpc_address: str  # host:port to serve prefix queries on
    health_host: str = "127.0.0.1"
    health_port: int = 0
    trace_file: Path | None = None
    otlp_endpoint: str = ""
    # A worker beats twice a second; after ten minutes of silence its blocks are only in the way.
    # It costs nothing to be wrong: the next heartbeat makes the worker known and replays.
    forget_after_s: float = 600.0
    redis_check_interval_s: float = 5.0
