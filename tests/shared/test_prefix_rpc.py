import asyncio
import json
from pathlib import Path

import pytest

from shared import farspan_pb2 as pb
from shared import prefix_rpc, telemetry
from shared.errors import BadRequest, ConfigError
from shared.prefix_rpc import IndexAway

HITS = pb.PrefixHits(hits=[pb.PrefixHit(tier=pb.TIER_HOST, num_blocks=3)])


async def test_a_query_is_answered_inside_the_askers_trace(tmp_path: Path) -> None:
    """One request is one trace, also across gRPC."""
    queries: list[pb.PrefixQuery] = []

    def answer(query: pb.PrefixQuery) -> pb.PrefixHits:
        with telemetry.span("server"):
            queries.append(query)
        return HITS

    spans = tmp_path / "spans"
    with telemetry.configure("test", trace_file=spans):
        async with (
            prefix_rpc.serve("127.0.0.1:0", answer) as port,
            prefix_rpc.connect(f"127.0.0.1:{port}") as client,
        ):
            with telemetry.span("client"):
                query = pb.PrefixQuery(block_hashes=bytes(16))
                assert await client.longest_prefix(query, timeout_s=5) == HITS

    server, client_span = (json.loads(line) for line in spans.read_text().splitlines())
    assert queries == [query]
    assert server["trace_id"] == client_span["trace_id"]
    assert server["parent_id"] == client_span["span_id"]


async def test_a_million_token_prompt_fits_in_a_query() -> None:
    """16,384 hashes are 256 KiB; gRPC's own limit is 4 MiB."""
    sizes: list[int] = []

    def answer(query: pb.PrefixQuery) -> pb.PrefixHits:
        sizes.append(len(query.block_hashes))
        return HITS

    async with (
        prefix_rpc.serve("127.0.0.1:0", answer) as port,
        prefix_rpc.connect(f"127.0.0.1:{port}") as client,
    ):
        await client.longest_prefix(pb.PrefixQuery(block_hashes=bytes(16 * 16_384)), timeout_s=5)

    assert sizes == [16 * 16_384]


async def test_nobody_there_and_a_refused_query_are_told() -> None:
    """The router then places without hits; it must not wait or guess."""

    def refuse(query: pb.PrefixQuery) -> pb.PrefixHits:
        raise BadRequest("half a hash")

    async with (
        prefix_rpc.serve("127.0.0.1:0", refuse) as port,
        prefix_rpc.connect(f"127.0.0.1:{port}") as client,
    ):
        with pytest.raises(IndexAway, match="half a hash"):
            await client.longest_prefix(pb.PrefixQuery(), timeout_s=5)

    async with prefix_rpc.connect(f"127.0.0.1:{port}") as client:
        with pytest.raises(IndexAway, match="UNAVAILABLE"):
            await client.longest_prefix(pb.PrefixQuery(), timeout_s=5)


async def test_a_client_finds_a_server_that_comes_later() -> None:
    """kv_index may start after the router, and restart at any time."""
    async with prefix_rpc.serve("127.0.0.1:0", lambda query: HITS) as port:
        pass
    async with prefix_rpc.connect(f"127.0.0.1:{port}") as client:
        with pytest.raises(IndexAway):
            await client.longest_prefix(pb.PrefixQuery(), timeout_s=5)
        async with prefix_rpc.serve(f"127.0.0.1:{port}", lambda query: HITS):
            assert await _first_answer(client) == HITS


async def test_an_address_in_use_is_the_operators_fault() -> None:
    """Two services must not share a port in silence."""
    async with prefix_rpc.serve("127.0.0.1:0", lambda query: HITS) as port:
        with pytest.raises(ConfigError, match=str(port)):
            async with prefix_rpc.serve(f"127.0.0.1:{port}", lambda query: HITS):
                pass


async def _first_answer(client: prefix_rpc.PrefixClient) -> pb.PrefixHits:
    async with asyncio.timeout(10):
        while True:
            try:
                return await client.longest_prefix(pb.PrefixQuery(), timeout_s=1)
            except IndexAway:
                await asyncio.sleep(0.05)
