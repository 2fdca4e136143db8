"""The settings of the router."""

from dataclasses import dataclass
from pathlib import Path

from services.router.view import Rates


@dataclass(frozen=True)
class RouterConfig:
    """Read from ROUTER_* variables."""

    nats_url: str
    kv_index_address: str  # host:port of the prefix queries
    health_host: str = "127.0.0.1"
    health_port: int = 0
    trace_file: Path | None = None
    otlp_endpoint: str = ""
    # A placement without hits costs a prefill; waiting longer for an index that is away costs more.
    index_timeout_s: float = 0.1
    silence_s: float = 3.0  # six heartbeats
    learn_s: float = 0.6  # a heartbeat and a little: before that the fleet is not known
    max_waiting: int = Rates.max_waiting
    link_bytes_per_s: float = Rates.link_bytes_per_s

    @property
    def rates(self) -> Rates:
        """What the policy counts with."""
        return Rates(link_bytes_per_s=self.link_bytes_per_s, max_waiting=self.max_waiting)
