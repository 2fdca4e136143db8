"""What changed in a block cache, for those who search it from outside."""

from dataclasses import dataclass

from shared.block_hash import BlockHash


@dataclass(frozen=True)
class Stored:
    """These hashes can be found from now on, in chain order."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True)
class Removed:
    """The last copy of each of these hashes is gone, tail before head."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True)
class Cleared:
    """Nothing can be found any more."""


CacheEvent = Stored | Removed | Cleared
