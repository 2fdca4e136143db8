"""kv_index against ai-dynamo-runtime's RadixTree, in one run: lookups, ingest, and gRPC.

Both sides get the same chains and the same workers in the forms in which they get them in service:
protobuf messages and packed hashes here, JSON events and lists of integers there.
"""

import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import report
from services.kv_index import app
from services.kv_index.index import Index
from shared import farspan_pb2 as pb
from shared import prefix_rpc
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES

NUM_WORKERS = 16
NUM_CHAINS = 64
CHAIN_BLOCKS = 16_384  # a prompt of a million tokens; 64 of them are a million blocks
EVENT_BLOCKS = 512
_EVENT_BYTES = EVENT_BLOCKS * HASH_BYTES
_SEED = 4
_NUM_ROUNDS = 16
_MAX_BLOCKS = 4_194_304  # as served


@dataclass
class _Timed:
    """Seconds of calls."""

    seconds: list[float] = field(default_factory=list)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = function(*arguments)
        self.seconds.append(time.perf_counter() - begin)
        return result

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    @property
    def p50_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def measure() -> dict[str, float]:
    """The figures; half a minute on an idle machine. Needs the `bench` packages."""
    try:
        from dynamo._core import RadixTree
    except ModuleNotFoundError as error:
        raise SystemExit(
            "this compares with ai-dynamo-runtime: pip install --group bench"
        ) from error
    index, tree, chains = Index(_MAX_BLOCKS), RadixTree(), _chains()
    figures = _ingest(index, tree, chains)
    figures |= _lookup(index, tree, chains)
    figures |= _ragged()
    return figures | asyncio.run(_grpc(chains))


def _chains() -> list[bytes]:
    generator = random.Random(_SEED)
    return [generator.randbytes(CHAIN_BLOCKS * HASH_BYTES) for _ in range(NUM_CHAINS)]


def _ingest(index: Index, tree: Any, chains: list[bytes]) -> dict[str, float]:
    """Every worker stores every chain, in events of 512 blocks; the sides take turns."""
    ours, theirs = _Timed(), _Timed()
    for number, chain in enumerate(chains):
        events = list(_dynamo_events(chain))
        for worker in range(NUM_WORKERS):
            batches = [batch.SerializeToString() for batch in _batches(worker, number, chain)]
            ours.call(_apply, index, batches)
            theirs.call(_apply_there, tree, worker, events)
        report.progress(f"chain {number}: {ours.total_s:.2f} s, RadixTree {theirs.total_s:.2f} s")
    num_blocks = NUM_WORKERS * NUM_CHAINS * CHAIN_BLOCKS
    return {
        "ingest_blocks_per_s": num_blocks / ours.total_s,
        "ingest_dynamo_blocks_per_s": num_blocks / theirs.total_s,
        "ingest_vs_dynamo": theirs.total_s / ours.total_s,
        # The first worker's blocks are all new.
        "ingest_new_vs_dynamo": sum(theirs.seconds[::NUM_WORKERS])
        / sum(ours.seconds[::NUM_WORKERS]),
    }


def _apply(index: Index, batches: list[bytes]) -> None:
    for batch in batches:
        index.apply(pb.BlockEvents.FromString(batch))


def _apply_there(tree: Any, worker: int, events: list[bytes]) -> None:
    for event in events:
        tree.apply_event(worker, event)
    tree.find_matches([0])  # its work is done on a thread; this waits for it


def _lookup(index: Index, tree: Any, chains: list[bytes]) -> dict[str, float]:
    """All chains, which all workers hold whole, one after another; the sides take turns."""
    ours, theirs, lists = _Timed(), _Timed(), [_integers(chain) for chain in chains]
    for _ in range(_NUM_ROUNDS):
        found = [ours.call(index.longest_prefix, chain) for chain in chains]
        scores = [theirs.call(tree.find_matches, hashes).scores for hashes in lists]
        for hits, there in zip(found, scores, strict=True):
            if [hit.num_blocks for hit in hits] != sorted(there.values()):
                raise AssertionError("the two sides disagree")
    return {
        "lookup_p50_ms": ours.p50_ms,
        "lookup_dynamo_p50_ms": theirs.p50_ms,
        "lookup_vs_dynamo": theirs.total_s / ours.total_s,
    }


def _ragged() -> dict[str, float]:
    """Every worker holds another length of every chain: the most steps there can be."""
    index, chains, lengths = Index(_MAX_BLOCKS), _chains(), random.Random(_SEED)
    for number, chain in enumerate(chains):
        for worker in range(NUM_WORKERS):
            num_events = lengths.randint(1, CHAIN_BLOCKS // EVENT_BLOCKS)
            cut = num_events * _EVENT_BYTES - HASH_BYTES * worker
            batch = _batch(worker, number + 1, chain[:cut])
            index.apply(batch)
    timed = _Timed()
    for chain in chains * _NUM_ROUNDS:
        timed.call(index.longest_prefix, chain)
    return {"lookup_ragged_p50_ms": timed.p50_ms}


async def _grpc(chains: list[bytes]) -> dict[str, float]:
    """From the client's call to its answer, one at a time; the server is another process."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    try:
        port = await asyncio.to_thread(here.recv)
        seconds = []
        async with prefix_rpc.connect(f"127.0.0.1:{port}") as client:
            for chain in chains * 5:
                begin = time.perf_counter()
                answer = await client.longest_prefix(
                    pb.PrefixQuery(block_hashes=chain), timeout_s=10
                )
                seconds.append(time.perf_counter() - begin)
                if {hit.num_blocks for hit in answer.hits} != {CHAIN_BLOCKS}:
                    raise AssertionError("the answer is wrong")
        return {
            "grpc_p50_ms": 1e3 * statistics.median(seconds),
            "grpc_p99_ms": 1e3 * statistics.quantiles(seconds, n=100)[-1],
        }
    finally:
        here.send("stop")
        await asyncio.to_thread(server.join)


def _serve(pipe: Connection) -> None:
    index = Index(_MAX_BLOCKS)
    for number, chain in enumerate(_chains()):
        for worker in range(NUM_WORKERS):
            index.apply(_batch(worker, number + 1, chain))

    async def main() -> None:
        def answer(query: pb.PrefixQuery) -> pb.PrefixHits:
            return app.answer(index, query)

        async with prefix_rpc.serve("127.0.0.1:0", answer) as port:
            pipe.send(port)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


def _batches(worker: int, number: int, chain: bytes) -> Iterator[pb.BlockEvents]:
    first = number * CHAIN_BLOCKS // EVENT_BLOCKS + 1
    for place, begin in enumerate(range(0, len(chain), _EVENT_BYTES)):
        yield _batch(worker, first + place, chain[begin : begin + _EVENT_BYTES])


def _batch(worker: int, sequence: int, packed: bytes) -> pb.BlockEvents:
    num_tokens = len(packed) // HASH_BYTES * BLOCK_TOKENS
    stored = pb.BlocksStored(tier=pb.TIER_DEVICE, block_hashes=packed, num_tokens=num_tokens)
    ref = pb.WorkerRef(worker_id=f"worker-{worker:02}", epoch=1)
    return pb.BlockEvents(worker=ref, sequence=sequence, events=[pb.BlockEvent(stored=stored)])


def _dynamo_events(chain: bytes) -> Iterator[bytes]:
    hashes = _integers(chain)
    for begin in range(0, len(hashes), EVENT_BLOCKS):
        blocks = [
            {"block_hash": block_hash, "tokens_hash": block_hash}
            for block_hash in hashes[begin : begin + EVENT_BLOCKS]
        ]
        stored = {"parent_hash": hashes[begin - 1] if begin else None, "blocks": blocks}
        yield json.dumps({"event_id": begin, "data": {"stored": stored}}).encode()


def _integers(chain: bytes) -> list[int]:
    """Its hashes have eight bytes."""
    return [
        int.from_bytes(chain[at : at + 8], "little") >> 1 for at in range(0, len(chain), HASH_BYTES)
    ]


if __name__ == "__main__":
    report.write("index_speed", measure())
    sys.exit(0)
