"""A running gateway in front of a fake fleet, over the real bus and real HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai

from services.gateway.app import Serving, serve
from services.gateway.config import GatewayConfig
from services.gateway.text.tokenizer import Tokenizer
from shared import bus
from tests.fakes import FakeFleet, Plan

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "demo-fp8"
MODEL = "demo"
TOKENIZER = Tokenizer(CHECKPOINT)


@dataclass
class Stage:
    """Everything a test talks to."""

    fleet: FakeFleet
    url: str
    http: httpx.AsyncClient
    tokenizer: Tokenizer
    serving: Serving

    @cached_property
    def client(self) -> openai.AsyncOpenAI:
        """Made where it is used: it reads all authorities' certificates, which takes 30 ms."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def ready(self) -> None:
        """Wait until the gateway would serve a request."""
        await eventually(lambda: self.serving.readiness.read()[0])

    def plan(self, text: str, **settings: Any) -> Plan:
        """The plan of an answer that ends with a stop token; it is all later attempts' plan too."""
        plan = Plan([*self.tokenizer.encode(text), 4076], **settings)
        self.fleet.plans.append(plan)
        return plan

    async def complete(self, **fields: Any) -> httpx.Response:
        """POST /v1/completions with a prompt."""
        body = {"model": MODEL, "prompt": "Once", **fields}
        return await self.http.post("/v1/completions", json=body)


@asynccontextmanager
async def staged(nats_url: str, *, is_empty: bool = False, **settings: Any) -> AsyncIterator[Stage]:
    """A gateway with one pair of workers, ready to serve."""
    config = GatewayConfig(
        host="127.0.0.1",
        port=0,
        nats_url=nats_url,
        checkpoint=CHECKPOINT,
        model=MODEL,
        drain_s=settings.pop("drain_s", 1.0),
        **settings,
    )
    async with bus.connect(nats_url, "fakes") as connection, serve(config) as serving:
        url = f"http://127.0.0.1:{serving.port}"
        async with (
            FakeFleet(connection, MODEL).running() as fleet,
            httpx.AsyncClient(base_url=url, timeout=10, verify=False) as http,
        ):
            stage = Stage(fleet, url, http, TOKENIZER, serving)
            if not is_empty:
                await fleet.add_pair()
                await stage.ready()
            try:
                yield stage
            finally:
                if "client" in vars(stage):
                    await stage.client.close()


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """Wait for a condition, and how long that took; fails after within_s."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < within_s, "it did not happen in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - begun_s
