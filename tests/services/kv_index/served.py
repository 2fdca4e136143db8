"""A kv_index on the real bus, and what its tests ask of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from services.kv_index import app
from services.kv_index.config import KvIndexConfig
from services.kv_index.events import Life
from shared import farspan_pb2 as pb
from shared import prefix_rpc
from shared.block_hash import BlockHash, pack
from shared.prefix_rpc import PrefixClient

Hits = dict[Life, tuple[int, pb.Tier]]


async def figures(config: KvIndexConfig) -> dict[str, float]:
    """What Prometheus would read: its names and values."""
    url = f"http://127.0.0.1:{config.health_port}/metrics"
    async with httpx.AsyncClient() as client:
        text = (await client.get(url)).text
    values = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("farspan_kv_index_"): float(value) for name, value in values}


@asynccontextmanager
async def serving(config: KvIndexConfig) -> AsyncIterator[PrefixClient]:
    async with app.serve(config) as port, prefix_rpc.connect(f"127.0.0.1:{port}") as client:
        yield client


async def hits(client: PrefixClient, hashes: list[BlockHash]) -> Hits:
    query = pb.PrefixQuery(block_hashes=pack(hashes))
    answer = await client.longest_prefix(query, timeout_s=5)
    return {
        Life(hit.worker.worker_id, hit.worker.epoch): (hit.num_blocks, hit.tier)
        for hit in answer.hits
    }


async def eventually(client: PrefixClient, hashes: list[BlockHash], expected: Hits) -> None:
    """Events travel; the answer must become right, and soon."""
    await until(lambda: hits(client, hashes), expected)


async def until(read: Callable[[], Awaitable[object]], expected: object) -> None:
    seen: object = None
    try:
        async with asyncio.timeout(5):
            while True:
                seen = await read()
                if seen == expected:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"still {seen}, expected {expected}")


def next_life(life: Life) -> Life:
    return Life(life.worker_id, life.epoch + 1)


def sparse_batch(life: Life, chain: list[BlockHash], sequence: int) -> pb.BlockEvents:
    """Blocks of another size than ours: they stand for four times as many tokens."""
    sparse = pb.BlocksStored(tier=pb.TIER_DEVICE, block_hashes=pack(chain), num_tokens=64 * 40)
    return pb.BlockEvents(
        worker=pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch),
        sequence=sequence,
        events=[pb.BlockEvent(stored=sparse)],
    )
