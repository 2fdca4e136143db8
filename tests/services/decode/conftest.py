"""A decode worker on a real bus, and the prefill side that feeds it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from services.decode import app
from services.decode.app import DecodeService
from services.decode.config import DecodeConfig
from shared import bus
from shared import farspan_pb2 as pb
from tests.services.decode.prefill_side import CHECKPOINT, KV_FORMAT, PrefillSide, Source

_numbers = itertools.count()


@dataclass
class Stage:
    """Both sides at work."""

    service: DecodeService
    side: PrefillSide

    async def is_back_to_base(self) -> None:
        """Return when nothing is held any more; fails after ten seconds."""
        rank = self.service.rank
        await self.service.intake.until_over(10)
        assert self.service.intake.num_live == 0
        await asyncio.wrap_future(rank.steps.check_integrity())
        rank.blocks.check_integrity()
        capacity = self.service.capacity
        assert rank.blocks.num_free == capacity.host_pages
        assert rank.scheduler.free == capacity
        assert rank.scheduler.num_waiting == 0


StartStage = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture(scope="session")
def source() -> Iterator[Source]:
    """The prefill engine; registered pools live until the process ends, so there is one."""
    made = Source()
    with made.exporter:
        yield made


@pytest.fixture
def stage(nats_url: str, source: Source) -> StartStage:
    """Starts a worker with the settings given."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Stage]:
        number = next(_numbers)
        config = DecodeConfig(
            **{
                "nats_url": nats_url,
                "checkpoint": CHECKPOINT,
                "worker_id": f"d{number}",
                "kv_format": KV_FORMAT,
                "host_pool_mib": 48,
                "device_pool_mib": 32,
                "index_pool_mib": 8,
                "hot_rows": 256,
                "drain_s": 0.2,
                **settings,
            }
        )
        async with (
            app.serve(config) as service,
            bus.connect(nats_url, "prefill-side") as link,
            PrefillSide(
                link,
                service.rank.worker,
                source,
                pb.WorkerRef(worker_id=f"p{number}", epoch=source.epoch),
                gateway_id=f"gw{number}",
            ).running() as side,
        ):
            yield Stage(service, side)

    return start
