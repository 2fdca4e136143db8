"""The door as the settings want it, for as long as the gateway runs."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.gateway.config import GatewayConfig
from services.gateway.door.doorkeeper import ErrorShape, Rules
from services.gateway.door.keyring import Keyring
from services.gateway.door.limits import Bounds, Turnstile
from services.gateway.door.origin import is_loopback
from shared import tasks


@dataclass(frozen=True)
class Door:
    """What a doorkeeper needs."""

    rules: Rules
    turnstile: Turnstile


@asynccontextmanager
async def opened(
    config: GatewayConfig, error_shapes: Mapping[str, ErrorShape]
) -> AsyncIterator[Door]:
    """A door inside the block, whose keys follow their file.

    `error_shapes` are APIs' error bodies by the beginning of their paths. Raises ConfigError for a
    file of keys that cannot be used.
    """
    keyring = Keyring(config.api_keys_file) if config.api_keys_file is not None else None
    rules = Rules(
        keyring=keyring,
        has_own_host_only=keyring is None and is_loopback(config.host),
        max_body_bytes=config.max_body_bytes,
        body_timeout_s=config.body_timeout_s,
        host_names=config.host_names,
        debug_token=config.debug_token,
        error_shapes=error_shapes,
    )
    door = Door(rules, Turnstile(Bounds(config.max_in_flight, config.max_queued)))
    if keyring is None:
        yield door
        return
    async with tasks.background(keyring.watch()):
        yield door
