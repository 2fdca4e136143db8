"""The gateway's fixture."""

from collections.abc import AsyncIterator

import pytest

from tests.services.gateway.stage import Stage, staged


@pytest.fixture
async def stage(nats_url: str) -> AsyncIterator[Stage]:
    """A gateway with one pair of workers and default settings."""
    async with staged(nats_url) as running:
        yield running
