import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.kv_index.config import KvIndexConfig
from services.kv_index.events import Life
from services.local.servers import free_port, redis_command
from shared import bus
from shared.block_hash import BlockHash
from shared.bus import Bus
from tests.local_server import LocalServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[LocalServer]:
    port = free_port()
    server = LocalServer(redis_command(port, tmp_path), port, tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def config(nats_url: str, redis_url: str) -> KvIndexConfig:
    """In a Redis that all tests share: whom others' index left out is no matter of this one."""
    async with aclosing(Redis.from_url(redis_url)) as redis:
        await redis.delete("farspan:kv:v2:over")
    return KvIndexConfig(
        nats_url=nats_url,
        redis_url=redis_url,
        grpc_address="127.0.0.1:0",
        redis_check_interval_s=0.2,
        health_port=free_port(),
    )


@pytest.fixture
async def link(nats_url: str) -> AsyncIterator[Bus]:
    async with bus.connect(nats_url, "test") as link:
        yield link


@pytest.fixture
def life() -> Life:
    return Life(f"w-{uuid.uuid4().hex}", time.time_ns())


@pytest.fixture
def chain() -> list[BlockHash]:
    return [BlockHash(uuid.uuid4().bytes) for _ in range(10)]
