"""The identity of a block: its 64 tokens, everything before them, and who may share them.

One definition for all services and all time: the values are stored in Redis and compared between
machines, so the golden vectors in the test never change (ADR-0003).
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)  # 16 bytes

BLOCK_TOKENS = 64
HASH_BYTES = 16
_TOKEN_BYTES = 4
_BLOCK_BYTES = BLOCK_TOKENS * _TOKEN_BYTES
_PERSON = b"farspan-block-v1"  # keeps these hashes apart from any other use of blake2b


def namespace(model: str, revision: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """The chain's first parent. Two requests can share blocks only if all four names are equal."""
    digest = blake2b(digest_size=HASH_BYTES, person=_PERSON)
    for part in (model, revision, cache_salt, adapter):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little"))  # so that ("ab", "c") is not ("a", "bc")
        digest.update(data)
    return digest.digest()


def block_hashes(namespace: bytes, token_ids: Sequence[int] | bytes) -> list[BlockHash]:
    """One hash per full block, in order; a rest shorter than a block has none.

    `token_ids` given as bytes are little-endian uint32, as on the wire.
    """
    data = token_ids if isinstance(token_ids, bytes) else token_bytes(token_ids)
    _check_whole(data, _TOKEN_BYTES, "token ids")
    parent = namespace
    hashes: list[BlockHash] = []
    for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        parent = blake2b(parent + block, digest_size=HASH_BYTES, person=_PERSON).digest()
        hashes.append(BlockHash(parent))
    return hashes


def pack(hashes: Iterable[BlockHash]) -> bytes:
    """The wire form: all hashes, one after another."""
    return b"".join(hashes)


def unpack(data: bytes) -> list[BlockHash]:
    """The hashes of a wire form. Raises ValueError if it holds a part of one."""
    _check_whole(data, HASH_BYTES, "block hashes")
    return [BlockHash(data[i : i + HASH_BYTES]) for i in range(0, len(data), HASH_BYTES)]


def token_bytes(ids: Sequence[int]) -> bytes:
    """The wire form of token ids: little-endian uint32. Raises OverflowError outside that range."""
    return _little_endian(array("I", ids)).tobytes()


def token_ids(data: bytes) -> list[int]:
    """The token ids of a wire form. Raises ValueError if it holds a part of one."""
    _check_whole(data, _TOKEN_BYTES, "token ids")
    return _little_endian(array("I", data)).tolist()


def _little_endian(values: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _check_whole(data: bytes, unit_bytes: int, what: str) -> None:
    if len(data) % unit_bytes:
        raise ValueError(f"{what}: {len(data)} bytes are not a multiple of {unit_bytes}")
