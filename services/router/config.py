"""The settings of the router."""

import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from services.router.view import Rates
from shared.access import ANONYMOUS, Access


def _fresh_id() -> str:
    return f"router-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True)
class RouterConfig:
    """Read from ROUTER_* variables."""

    nats_url: str
    kv_index_address: str  # host:port of the prefix queries
    # Where the routers of a fleet share their promises: redis://[[user]:password@]host:port/db, or
    # rediss:// for TLS; empty = this router is the only one.
    redis_url: str = ""
    # ROUTER_NATS_CREDENTIALS_FILE, _CA_FILE, _CERT_FILE, _KEY_FILE; the other two alike.
    nats: Access = ANONYMOUS
    redis: Access = ANONYMOUS
    kv_index: Access = ANONYMOUS
    redis_timeout_s: float = 0.25  # of one step; an outage holds requests up once for this long
    id: str = field(default_factory=_fresh_id)  # stands in this router's decisions
    decisions_kept: int = 2000  # the latest; about 8 KB each in a fleet of 32
    decisions_file: Path | None = None  # every decision as a line of JSON; it grows without bound
    health_host: str = "127.0.0.1"
    health_port: int = 0
    trace_file: Path | None = None
    otlp_endpoint: str = ""
    # A placement without hits costs a prefill; waiting longer for an index that is away costs more.
    index_timeout_s: float = 0.1
    silence_s: float = 3.0  # six heartbeats
    gateway_silence_s: float = 10.0  # a gateway speaks once a second; then its promises are ended
    learn_s: float = 0.6  # a heartbeat and a little: before that the fleet is not known
    max_waiting: int = Rates.max_waiting
    link_bytes_per_s: float = Rates.link_bytes_per_s

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.id):
            raise ValueError(f"id {self.id!r} is not made of [A-Za-z0-9_-]")
        for name in (
            "index_timeout_s",
            "redis_timeout_s",
            "silence_s",
            "gateway_silence_s",
            "link_bytes_per_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if min(self.decisions_kept, self.max_waiting, self.learn_s) < 0:
            raise ValueError("decisions_kept, max_waiting and learn_s must not be negative")

    @property
    def rates(self) -> Rates:
        """What the policy counts with."""
        return Rates(link_bytes_per_s=self.link_bytes_per_s, max_waiting=self.max_waiting)
