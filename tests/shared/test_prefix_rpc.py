import asyncio
import json
from pathlib import Path

import pytest
import trustme

from shared import farspan_pb2 as pb
from shared import prefix_rpc, telemetry
from shared.access import Access
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


@pytest.mark.parametrize(
    ("num_blocks", "num_held", "expected"),
    [
        pytest.param(4095, 1001, 1001, id="exact"),
        pytest.param(4096, 1001, 1000, id="every-second"),
        pytest.param(16_384, 16_383, 16_376, id="every-eighth"),
        pytest.param(16_384, 16_384, 16_384, id="whole"),
        pytest.param(16_391, 16_391, 16_384, id="with-a-rest"),
    ],
)
async def test_a_hit_of_a_very_long_prompt_loses_less_than_a_2048th_of_it(
    num_blocks: int, num_held: int, expected: int
) -> None:
    """A hash stands for all before it, so fewer of them say the same, and sooner."""
    hashes = [place.to_bytes(16, "little") for place in range(num_blocks)]
    held = set(hashes[:num_held])
    sizes: list[int] = []

    def answer(query: pb.PrefixQuery) -> pb.PrefixHits:
        asked = [query.block_hashes[at : at + 16] for at in range(0, len(query.block_hashes), 16)]
        sizes.append(len(asked))
        return pb.PrefixHits(hits=[pb.PrefixHit(num_blocks=sum(key in held for key in asked))])

    async with (
        prefix_rpc.serve("127.0.0.1:0", answer) as port,
        prefix_rpc.connect(f"127.0.0.1:{port}") as client,
    ):
        query = pb.PrefixQuery(block_hashes=b"".join(hashes))
        answered = await client.longest_prefix(query, timeout_s=5)

    assert answered.hits[0].num_blocks == expected
    assert sizes[0] < 4096
    assert len(query.block_hashes) == 16 * num_blocks, "the caller's query is not touched"


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


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A CA, a server's and a client's certificate, and a token."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("127.0.0.1", "client"):
        pair = authority.issue_cert(name)
        pair.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        pair.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    (tmp_path / "token").write_text("right\n")
    (tmp_path / "wrong").write_text("wrong\n")
    return tmp_path


def as_server(papers: Path) -> Access:
    return Access(
        papers / "token", papers / "ca.pem", papers / "127.0.0.1.pem", papers / "127.0.0.1.key"
    )


async def test_a_known_client_is_answered_over_tls(papers: Path) -> None:
    client = Access(
        papers / "token", papers / "ca.pem", papers / "client.pem", papers / "client.key"
    )
    async with (
        prefix_rpc.serve("127.0.0.1:0", lambda _: HITS, as_server(papers)) as port,
        prefix_rpc.connect(f"127.0.0.1:{port}", client) as asking,
    ):
        assert await asking.longest_prefix(pb.PrefixQuery(), timeout_s=5) == HITS


@pytest.mark.parametrize(
    ("client", "told"),
    [
        pytest.param({}, "UNAVAILABLE", id="in-the-clear"),
        pytest.param({"ca_file": "ca.pem"}, "UNAVAILABLE", id="without-a-certificate"),
        pytest.param(
            {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client.key"},
            "UNAUTHENTICATED",
            id="without-a-token",
        ),
        pytest.param(
            {
                "credentials_file": "wrong",
                "ca_file": "ca.pem",
                "cert_file": "client.pem",
                "key_file": "client.key",
            },
            "UNAUTHENTICATED",
            id="with-a-wrong-token",
        ),
    ],
)
async def test_a_stranger_is_not_answered(client: dict[str, str], told: str, papers: Path) -> None:
    """Hashes tell who asked the same thing before."""
    asked: list[pb.PrefixQuery] = []

    def answer(query: pb.PrefixQuery) -> pb.PrefixHits:
        asked.append(query)
        return HITS

    access = Access(**{key: papers / name for key, name in client.items()})
    async with (
        prefix_rpc.serve("127.0.0.1:0", answer, as_server(papers)) as port,
        prefix_rpc.connect(f"127.0.0.1:{port}", access) as asking,
    ):
        with pytest.raises(IndexAway, match=told) as refused:
            await asking.longest_prefix(pb.PrefixQuery(), timeout_s=2)
    assert "right" not in str(refused.value)
    assert not asked


async def test_files_that_cannot_be_used_end_the_start(papers: Path) -> None:
    with pytest.raises(ConfigError, match="token"):
        async with prefix_rpc.serve(
            "127.0.0.1:0",
            lambda _: HITS,
            Access(None, None, papers / "token", papers / "token"),
        ):
            pass
    with pytest.raises(ConfigError, match="needs a certificate"):
        async with prefix_rpc.serve(
            "127.0.0.1:0", lambda _: HITS, Access(ca_file=papers / "ca.pem")
        ):
            pass
