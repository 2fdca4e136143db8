"""How long one router takes to place a request, at 300 a second, with everything it does for one.

The real handler on the real bus: prompts of 104K tokens as bytes in and replies as bytes out, hits
over gRPC from a kv_index in another process, promises kept and, as served, shared through Redis.
"""

import asyncio
import multiprocessing
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from socket import create_connection

from benchmarks import report
from benchmarks.placement.beats import fixed_part
from services.kv_index import app as kv_index
from services.kv_index.index import Index
from services.local.servers import free_port, nats_command, redis_command
from services.router import app
from services.router.app import Router
from services.router.config import RouterConfig
from shared import farspan_pb2 as pb
from shared import lifecycle, prefix_rpc
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES

PLACEMENTS_PER_S = 300
PROMPT_TOKENS = 104_000
NUM_WORKERS = 16  # of each role
_NUM_PROMPTS = 256
_PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
_SECONDS, _WARM_UP = 10, 300
_REQUEST_S = 5.0  # after this a request has ended, so 1,500 promises are open
_BEAT_S = 0.5


def measure() -> dict[str, float]:
    """The figures; half a minute on an idle machine."""
    here, there = multiprocessing.Pipe()
    index = multiprocessing.get_context("spawn").Process(target=_serve_index, args=(there,))
    index.start()
    try:
        with ExitStack() as servers:
            nats, redis = (servers.enter_context(_server(name)) for name in ("nats", "redis"))
            alone = RouterConfig(
                nats_url=f"nats://127.0.0.1:{nats}", kv_index_address=f"127.0.0.1:{here.recv()}"
            )
            shared = replace(alone, redis_url=f"redis://127.0.0.1:{redis}/0")
            alone_ms = asyncio.run(_latencies_ms(alone))
            shared_ms = asyncio.run(_latencies_ms(shared))
    finally:
        here.send("stop")
        index.join()
    return {
        "placement_p50_ms": statistics.median(shared_ms),
        "placement_p99_ms": _p99(shared_ms),
        "placement_unshared_p50_ms": statistics.median(alone_ms),
        "placement_unshared_p99_ms": _p99(alone_ms),
        "placements_per_s": PLACEMENTS_PER_S,
    }


async def _latencies_ms(config: RouterConfig) -> list[float]:
    """From the moment a request was due, so a router that falls behind cannot hide it."""
    chains, latencies_ms = _chains(), []

    async def one(router: Router, number: int, due_s: float) -> None:
        reply = await router.place(pb.PlaceRequest.FromString(messages[number]))
        if not reply.HasField("placement") or not reply.SerializeToString():
            raise AssertionError(f"not placed: {reply}")
        if number >= _WARM_UP:
            latencies_ms.append(1e3 * (loop.time() - due_s))

    async def beat(router: Router) -> None:
        while True:
            for heartbeat in _heartbeats():
                await router.on_heartbeat(heartbeat)
            await asyncio.sleep(_BEAT_S)

    async with app.serve(config) as router:
        loop = asyncio.get_running_loop()
        beating = asyncio.create_task(beat(router))
        lifecycle.freeze_startup()  # as the process does
        count = _WARM_UP + _SECONDS * PLACEMENTS_PER_S
        messages = [_message(number, chains[number % _NUM_PROMPTS]) for number in range(count)]
        start_s = loop.time() + 0.5
        num_open = int(_REQUEST_S * PLACEMENTS_PER_S)
        async with asyncio.TaskGroup() as requests:
            for number in range(count):
                due_s = start_s + number / PLACEMENTS_PER_S
                await asyncio.sleep(due_s - loop.time())
                requests.create_task(one(router, number, due_s))
                if number >= num_open:
                    await router.on_ended(pb.PlacementEnded(request_id=str(number - num_open)))
        beating.cancel()
    return latencies_ms


def _message(number: int, chain: bytes) -> bytes:
    return pb.PlaceRequest(
        request_id=str(number),
        model="glm-5.3",
        block_hashes=chain,
        num_prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=500,
        deadline_unix_ms=int(1e3 * (time.time() + 3600)),
    ).SerializeToString()


def _heartbeats() -> Iterator[pb.Heartbeat]:
    load = pb.Load(
        free_blocks=90_000,
        total_blocks=100_000,
        free_device_pages=90_000,
        total_device_pages=100_000,
        free_index_pages=90_000,
        total_index_pages=100_000,
        tokens_per_s=20_000,
        eviction_age_s=600,
    )
    for role, letter in ((pb.ROLE_PREFILL, "p"), (pb.ROLE_DECODE, "d")):
        for number in range(NUM_WORKERS):
            heartbeat = fixed_part(f"{letter}{number:02}", role, BLOCK_TOKENS, 4096)
            heartbeat.load.CopyFrom(load)
            yield heartbeat


def _chains() -> list[bytes]:
    generator = random.Random(4)
    return [generator.randbytes(_PROMPT_BLOCKS * HASH_BYTES) for _ in range(_NUM_PROMPTS)]


def _serve_index(pipe: Connection) -> None:
    """Every worker holds another part of every prompt's chain."""
    index, lengths = Index(2**23), random.Random(4)
    for sequence, chain in enumerate(_chains(), start=1):
        for letter in "pd":
            for number in range(NUM_WORKERS):
                held = chain[: HASH_BYTES * lengths.randrange(1, _PROMPT_BLOCKS)]
                num_tokens = len(held) // HASH_BYTES * BLOCK_TOKENS
                stored = pb.BlocksStored(
                    tier=pb.TIER_DEVICE, block_hashes=held, num_tokens=num_tokens
                )
                worker = pb.WorkerRef(worker_id=f"{letter}{number:02}", epoch=1)
                events = [pb.BlockEvent(stored=stored)]
                index.apply(pb.BlockEvents(worker=worker, sequence=sequence, events=events))

    async def main() -> None:
        async with prefix_rpc.serve("127.0.0.1:0", lambda q: kv_index.answer(index, q)) as port:
            pipe.send(port)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


@contextmanager
def _server(name: str) -> Iterator[int]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = nats_command(port) if name == "nats" else redis_command(port, Path(folder))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int) -> None:
    for _ in range(500):
        try:
            with closing(create_connection(("127.0.0.1", port), timeout=1)):
                return
        except OSError:
            time.sleep(0.02)
    raise TimeoutError(f"nobody listens on {port}")


def _p99(milliseconds: list[float]) -> float:
    return statistics.quantiles(milliseconds, n=100)[-1]


if __name__ == "__main__":
    report.write("placement_speed", measure())
