"""The settings of kv_index."""

from dataclasses import dataclass
from pathlib import Path

from shared.access import ANONYMOUS, Access


@dataclass(frozen=True)
class KvIndexConfig:
    """Read from KV_INDEX_* variables."""

    nats_url: str
    redis_url: str  # redis://[[user]:password@]host:port/db, or rediss:// for TLS
    grpc_address: str  # host:port to serve prefix queries on
    nats: Access = ANONYMOUS  # KV_INDEX_NATS_CREDENTIALS_FILE, _CA_FILE, _CERT_FILE, _KEY_FILE
    redis: Access = ANONYMOUS
    # Our certificate, the token that routers must bear, and the CA of their certificates.
    grpc: Access = ANONYMOUS
    # Whether a Redis that does not answer at the start ends the process. False where somebody else
    # sees to it that Redis comes back: then the start is cold, and the copy is written afterwards.
    redis_required: bool = True
    health_host: str = "127.0.0.1"
    health_port: int = 0
    trace_file: Path | None = None
    otlp_endpoint: str = ""
    # Different blocks kept, at 40 bytes each. Beyond it new blocks are left out, and counted.
    max_blocks: int = 4_194_304
    # A worker beats twice a second; after ten minutes of silence its blocks are only in the way.
    # It costs nothing to be wrong: the next heartbeat makes the worker known and replays.
    forget_after_s: float = 600.0
    # A worker that has worked for so long without a block event is reported: routers are blind. So
    # is one that is ready for so long in a life that is over.
    mute_after_s: float = 60.0
    redis_check_interval_s: float = 5.0
