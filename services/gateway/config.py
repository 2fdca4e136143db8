"""The gateway's settings, read from GATEWAY_* variables."""

import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path


def _fresh_id() -> str:
    return f"gw-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True)
class GatewayConfig:
    """Where the gateway listens, what it serves, and the bounds of one request."""

    host: str
    port: int  # 0 = any free port
    nats_url: str
    checkpoint: Path  # a Hugging Face directory: tokenizer, chat template, configs
    model: str = ""  # the name clients use; empty = the checkpoint directory's name
    id: str = field(default_factory=_fresh_id)  # a NATS subject token, unique in the fleet
    default_max_tokens: int = 1024  # when the client does not say
    deadline_s: float = 600.0
    heartbeat_timeout_s: float = 3.0  # six missed heartbeats
    max_body_bytes: int = 32 << 20  # a million token ids as JSON are 7 MB, as text 5 MB
    drain_s: float = 30.0
    debug_token: str = ""  # opens /debug/decisions to who bears it; empty = there is no such page
    health_port: int = 0
    trace_file: Path | None = None
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.id):
            raise ValueError(f"id {self.id!r} is not made of [A-Za-z0-9_-]")
        for name in (
            "default_max_tokens",
            "deadline_s",
            "heartbeat_timeout_s",
            "max_body_bytes",
            "drain_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.model or self.checkpoint.resolve().name
