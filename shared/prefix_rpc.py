"""Prefix queries over gRPC: the method's path, the server end and the client end.

gRPC is used here alone. There is no generated stub: one method needs none. The trace context and
the caller's token travel in the call's metadata. Of a very long prompt every second, third... hash
is sent: a hash stands for all before it, and 256 KB would take longer to send than to answer.
"""

import hmac
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from shared import farspan_pb2 as pb
from shared import telemetry
from shared.access import ANONYMOUS, Access, read
from shared.block_hash import HASH_BYTES
from shared.errors import BadRequest, ConfigError

_SERVICE = "farspan.v1.KvIndex"
_METHOD = "LongestPrefix"
_STOP_S = 1.0
_MIN_SENT = 2048  # hashes: what a hit may lose is less than this part of the prompt
# By default gRPC waits up to two minutes before it looks for a server again.
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class IndexAway(Exception):
    """kv_index did not answer in time; the message says why."""


class PrefixClient:
    """Asks a kv_index. Lives on the event loop that opened it."""

    def __init__(self, channel: Any, token: str = "") -> None:
        self._authorization = {"authorization": f"Bearer {token}"} if token else {}
        self._call = channel.unary_unary(
            f"/{_SERVICE}/{_METHOD}",
            request_serializer=pb.PrefixQuery.SerializeToString,
            response_deserializer=pb.PrefixHits.FromString,
        )

    async def longest_prefix(self, query: pb.PrefixQuery, *, timeout_s: float) -> pb.PrefixHits:
        """The workers that hold leading blocks of the query. Raises IndexAway.

        Exact up to 4,095 blocks (262,000 tokens); beyond, to one part in 2,048.
        """
        metadata = tuple({**telemetry.inject(), **self._authorization}.items())
        stride = max(1, len(query.block_hashes) // HASH_BYTES // _MIN_SENT)
        if stride > 1:
            query = pb.PrefixQuery(block_hashes=_every(stride, query.block_hashes))
        try:
            hits: pb.PrefixHits = await self._call(query, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise IndexAway(f"{error.code().name}: {error.details()}") from error
        if stride > 1:
            for hit in hits.hits:
                hit.num_blocks *= stride
        return hits


@asynccontextmanager
async def connect(address: str, access: Access = ANONYMOUS) -> AsyncIterator[PrefixClient]:
    """A client of the kv_index at host:port; it need not be there yet, and may go and come back.

    Files about TLS in `access` turn TLS on; its credentials are a token. Raises ConfigError for
    files that cannot be used.
    """
    token = access.text()
    access.client_context()  # it raises for files that are no certificates; gRPC would only log
    if not access.has_tls_files:
        channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    else:
        certificates = grpc.ssl_channel_credentials(
            _content(access.ca_file), _content(access.key_file), _content(access.cert_file)
        )
        channel = grpc.aio.secure_channel(address, certificates, options=_CHANNEL_OPTIONS)
    async with channel:
        yield PrefixClient(channel, token)


@asynccontextmanager
async def serve(
    address: str,
    longest_prefix: Callable[[pb.PrefixQuery], pb.PrefixHits],
    access: Access = ANONYMOUS,
) -> AsyncIterator[int]:
    """Answer queries at host:port inside the block; yields the port, which 0 leaves to the system.

    A certificate in `access` turns TLS on; with a CA too, clients must have one that it vouches
    for. With credentials, clients must bear that token. Raises ConfigError if address or files
    cannot be used.
    """
    token = access.text()

    async def answer(query: pb.PrefixQuery, context: Any) -> pb.PrefixHits:
        metadata = dict(context.invocation_metadata())
        if not _is_admitted(metadata, token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token, or a wrong one")
        with telemetry.attached(metadata):
            try:
                return longest_prefix(query)
            except BadRequest as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                raise

    method = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=pb.PrefixQuery.FromString,
        response_serializer=pb.PrefixHits.SerializeToString,
    )
    # By default two processes could share a port by mistake, each with half of the queries.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method}),)
    )
    try:
        port = _add_port(server, address, access)
    except RuntimeError as error:
        raise ConfigError(f"cannot serve prefix queries on {address}: {error}") from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(_STOP_S)


def _add_port(server: Any, address: str, access: Access) -> int:
    """Raises RuntimeError if the address cannot be had, ConfigError for files."""
    if access.cert_file is None:
        if access.ca_file is not None:
            raise ConfigError("prefix queries: a CA file needs a certificate file and a key file")
        return int(server.add_insecure_port(address))
    access.client_context()  # it raises for files that are no certificates; gRPC would only log
    pair = (_content(access.key_file), _content(access.cert_file))
    authority = _content(access.ca_file)
    certificates = grpc.ssl_server_credentials([pair], authority, authority is not None)
    return int(server.add_secure_port(address, certificates))


def _is_admitted(metadata: Mapping[str, str | bytes], token: str) -> bool:
    """In the same time whatever is given, so that time tells nothing of the token."""
    given = metadata.get("authorization", "")
    encoded = given if isinstance(given, bytes) else given.encode()
    return not token or hmac.compare_digest(encoded, f"Bearer {token}".encode())


def _content(file: Path | None) -> bytes | None:
    return None if file is None else read(file)


def _every(stride: int, packed: bytes) -> bytes:
    """The last hash of each `stride`; a rest shorter than that has none."""
    words = array("Q", packed)  # two words a hash; slices of arrays are taken in C
    every = 2 * stride
    first, second = words[every - 2 :: every], words[every - 1 :: every]
    chosen = array("Q", bytes(HASH_BYTES * len(second)))
    chosen[0::2], chosen[1::2] = first, second
    return chosen.tobytes()
