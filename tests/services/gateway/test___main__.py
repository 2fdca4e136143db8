"""The gateway as a process: what the signals of an operator do to answers in flight."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.local.servers import free_port
from shared import bus
from tests.fakes import FakeFleet, Plan
from tests.services.gateway.stage import CHECKPOINT, MODEL, TOKENIZER, eventually

NUM_STREAMS, NUM_WHOLES = 8, 4
NUM_REQUESTS = NUM_STREAMS + NUM_WHOLES
DRAIN_S = 1.0
EXIT_S = 3.0  # beyond the drain: 0.2 to 0.6 s on an idle machine, 1.7 s on a starved one


@asynccontextmanager
async def gateway(
    nats_url: str, drain_s: float
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway's process and its address, ready to serve."""
    port = free_port()
    settings = {
        "GATEWAY_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "GATEWAY_NATS_URL": nats_url,
        "GATEWAY_CHECKPOINT": str(CHECKPOINT),
        "GATEWAY_MODEL": MODEL,
        "GATEWAY_DRAIN_S": str(drain_s),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env={**os.environ, **settings}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(20), httpx.AsyncClient(base_url=url) as http:
            await until_ready(http)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_ready(http: httpx.AsyncClient) -> None:
    while True:
        try:
            if (await http.get("/readyz")).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("signals", "gap_s", "drain_s", "stops_within_s"),
    [
        ([signal.SIGTERM], 0.0, DRAIN_S, DRAIN_S + EXIT_S),
        ([signal.SIGINT], 0.0, DRAIN_S, DRAIN_S + EXIT_S),
        ([signal.SIGTERM, signal.SIGTERM], 0.3, 60.0, EXIT_S),
        ([signal.SIGINT, signal.SIGINT], 0.3, 60.0, EXIT_S),
        ([signal.SIGTERM, signal.SIGINT], 0.0, 60.0, EXIT_S),
    ],
)
async def test_what_is_in_flight_when_the_process_must_end_ends_with_an_error(
    nats_url: str,
    signals: list[signal.Signals],
    gap_s: float,
    drain_s: float,
    stops_within_s: float,
) -> None:
    """Clients can tell a cut answer from a finished one, and no worker computes for nobody."""
    plans = [Plan(TOKENIZER.encode("One two."), hold_at=2) for _ in range(NUM_REQUESTS)]
    async with (
        bus.connect(nats_url, "fakes") as connection,
        FakeFleet(connection, MODEL, plans).running() as fleet,
    ):
        await fleet.add_pair()
        async with (
            gateway(nats_url, drain_s) as (process, url),
            httpx.AsyncClient(base_url=url, timeout=20) as http,
        ):
            streams, wholes = (
                [asyncio.create_task(post(http, is_stream)) for _ in range(count)]
                for is_stream, count in ((True, NUM_STREAMS), (False, NUM_WHOLES))
            )
            await eventually(lambda: len(fleet.submits) == NUM_REQUESTS)
            await asyncio.sleep(0.3)  # the first tokens are on their way to the clients
            for number in signals[:-1]:
                process.send_signal(number)
                await asyncio.sleep(gap_s)
            process.send_signal(signals[-1])
            begun_s = time.monotonic()
            await process.wait()
            took_s = time.monotonic() - begun_s

            for answer in await asyncio.gather(*streams):
                *tokens, last = answer.text.strip().split("\n\n")
                assert tokens, "the answer had begun"
                error = json.loads(last.removeprefix("data: "))["error"]
                assert (error["type"], error["code"]) == ("server_error", "shutting_down")
                assert "[DONE]" not in answer.text
            for answer in await asyncio.gather(*wholes):
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"]["code"] == "shutting_down"
        assert took_s < stops_within_s
        await eventually(lambda: len(fleet.ended) == NUM_REQUESTS)
        assert len(set(fleet.cancels)) == 2 * NUM_REQUESTS


async def post(http: httpx.AsyncClient, is_stream: bool) -> httpx.Response:
    body = {"model": MODEL, "prompt": "x", "stream": is_stream}
    return await http.post("/v1/completions", json=body)
