"""The gateway's settings, read from GATEWAY_* variables."""

import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from services.gateway.door.origin import is_loopback
from shared.access import ANONYMOUS, Access


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
    max_prompt_tokens: int = 1 << 21  # beyond any model's context
    tokenizer_cache_mib: int = 256  # token ids of texts that were seen before
    drain_s: float = 30.0
    # Who may call, a TOML file (docs/security.md). Without it all may, as one nameless caller:
    # where only this machine reaches `host`, or where allow_anonymous says so.
    api_keys_file: Path | None = None
    allow_anonymous: bool = False
    host_names: tuple[str, ...] = ()  # under which browsers know this gateway; addresses need none
    max_in_flight: int = 1024  # requests with a body, in whatever state
    max_queued: int = 512  # of these, waiting for a first token
    body_timeout_s: float = 120.0  # for the whole body
    tls_cert_file: Path | None = None  # PEM; with tls_key_file HTTPS is spoken, else HTTP
    tls_key_file: Path | None = None
    nats: Access = ANONYMOUS  # GATEWAY_NATS_CREDENTIALS_FILE, _CA_FILE, _CERT_FILE, _KEY_FILE
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
            "max_prompt_tokens",
            "drain_s",
            "max_in_flight",
            "max_queued",
            "body_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        self._check_door()

    def _check_door(self) -> None:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file come together")
        if self.api_keys_file is not None and self.allow_anonymous:
            raise ValueError("api_keys_file and allow_anonymous contradict each other")
        if self.is_open and not (self.allow_anonymous or is_loopback(self.host)):
            raise ValueError(
                f"others can reach {self.host!r}: it needs api_keys_file, or allow_anonymous=true"
            )

    @property
    def is_open(self) -> bool:
        """Whether everybody who can reach the gateway may use it."""
        return self.api_keys_file is None

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.model or self.checkpoint.resolve().name
