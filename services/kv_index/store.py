"""The index's durable, shared copy in Redis: the one place here that asks Redis.

farspan:kv:v2:epochs                      hash    worker id -> epoch; what is not here is not valid
farspan:kv:v2:life:{id}:{epoch}:sequence  string  the last batch that is in the sets
farspan:kv:v2:life:{id}:{epoch}:{tier}    set     block hashes in `device` or `host`
farspan:kv:v2:over                        zset    {epoch}:{end}:{id}, and when that was written

Whatever cannot be read in these keys, of another version or another hand, is as if it were not
there; a key of another type is Redis's error.
"""

import asyncio
import logging
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterError,
    ConnectionError,
    RedisError,
    ResponseError,
)

from services.kv_index import events, scripts
from services.kv_index.events import DEVICE_BIT, HOST_BIT, Change, End, Life
from services.kv_index.holdings import Delta, Extent
from shared.access import ANONYMOUS, Access, place
from shared.block_hash import HASH_BYTES
from shared.redis_link import open_redis

logger = logging.getLogger(__name__)

_Parsed = TypeVar("_Parsed")
_EPOCHS = "farspan:kv:v2:epochs"
_OVER = "farspan:kv:v2:over"
_TIERS = {DEVICE_BIT: "device", HOST_BIT: "host"}
_SCAN_COUNT = 4096
_TIMEOUT_S = 5.0
_CONNECT_S = 1.0
_KEEP_S = 86_400  # a life that no kv_index has followed for a day is only in the way
_STAGE_S = 60
_MAX_OVER = 8192
_PART_BYTES = 4096 * HASH_BYTES  # a command of this size keeps Redis from others for about 1 ms


class StoreAway(Exception):
    """Redis did not do what it was asked; the message says why."""


class StoreRefused(StoreAway):
    """Redis turned us away, or we it: a setting is wrong, and waiting does not help."""


class Store:
    """The durable copy. Every method raises StoreAway when Redis fails."""

    def __init__(self, url: str, access: Access = ANONYMOUS) -> None:
        """Raises ConfigError if the URL or the files cannot be used."""
        self._redis = open_redis(url, access, connect_timeout_s=_CONNECT_S)
        self._append = self._redis.register_script(scripts.APPEND)
        self._replace = self._redis.register_script(scripts.REPLACE)
        self._retire = self._redis.register_script(scripts.RETIRE)
        self.place = place(url)
        self._num_strange: dict[str, int] = {}  # by key, as told

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def load(self) -> list[Delta]:
        """Every valid life as it stands in the copy.

        Others may write meanwhile. The sequence is read before the blocks, so blocks are at least
        as new as it says, and replaying the events after it makes them exact.
        """
        return [await self._load(life) for life in await self._lives()]

    async def append(self, delta: Delta) -> bool:
        """Add a step; False if the copy is behind it and needs the whole life."""
        if delta.previous is None:
            await self._take_over(delta)
            return True
        arguments: list[str | bytes] = [_digits(delta.previous), _digits(delta.sequence)]
        for bit, is_stored, packed in delta.changes:
            arguments += [
                "SADD" if is_stored else "SREM",
                "3" if bit == DEVICE_BIT else "4",
                packed,
            ]
        done = await _run(self._append, _keys(delta.life), [*_head(delta.life), *arguments])
        return bool(done == b"done")

    async def retire(self, life: Life) -> None:
        """Remove a life, and its worker unless another life has begun."""
        await _run(self._retire, _keys(life), [life.worker_id, _digits(life.epoch)])

    async def over(self) -> dict[Life, End]:
        """The last lives that are over for good, oldest first."""
        async with _answering():
            members = await self._redis.zrange(_OVER, 0, -1)
        return dict(self._understood(_OVER, members, _parse_over))

    async def note_over(self, over: Mapping[Life, End]) -> None:
        """Remember that these lives are over; one that was refused may have stopped since."""
        async with _answering():
            pipeline = self._redis.pipeline(transaction=False)
            for life, end in over.items():
                pipeline.zrem(_OVER, _over_member(life, End.REFUSED))
                pipeline.zadd(_OVER, {_over_member(life, end): time.time()})
            pipeline.zremrangebyrank(_OVER, 0, -_MAX_OVER - 1)
            pipeline.expire(_OVER, _KEEP_S)
            await pipeline.execute()

    async def extents(self, lives: Iterable[Life]) -> dict[Life, Extent]:
        """How much the copy has of the lives that are valid in it; they are kept for another day.

        In one transaction: what others write meanwhile is not taken for a loss.
        """
        async with _answering():
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.hgetall(_EPOCHS)  # also with no lives this shows whether Redis is there
            for life in lives:
                _, sequence, device, host = _keys(life)
                pipeline.getex(sequence, ex=_KEEP_S).scard(device).scard(host)
                pipeline.expire(device, _KEEP_S).expire(host, _KEEP_S)
            epochs, *answers = await pipeline.execute()
        return {
            life: Extent(_number(sequence), num_device + num_host)
            for life, sequence, num_device, num_host in zip(
                lives, answers[::5], answers[1::5], answers[2::5], strict=True
            )
            if epochs.get(life.worker_id.encode()) == _digits(life.epoch).encode()
        }

    async def _take_over(self, delta: Delta) -> None:
        """Write aside in parts, so that others are served in between; then swap in one step."""
        stage = f"farspan:kv:v2:stage:{uuid.uuid4().hex}:"
        staged = {bit: stage + tier for bit, tier in _TIERS.items()}
        for bit, is_stored, packed in delta.changes:
            for at in range(0, len(packed), _PART_BYTES):
                members = _split(packed[at : at + _PART_BYTES])
                pipeline = self._redis.pipeline(transaction=False)
                (pipeline.sadd if is_stored else pipeline.srem)(staged[bit], *members)
                pipeline.expire(staged[bit], _STAGE_S)
                async with _answering():
                    await pipeline.execute()
        keys = [*_keys(delta.life), *staged.values()]
        await _run(self._replace, keys, [*_head(delta.life), _digits(delta.sequence)])

    async def _lives(self) -> list[Life]:
        async with _answering():
            epochs: Mapping[bytes, bytes] = await self._redis.hgetall(_EPOCHS)
        return self._understood(_EPOCHS, epochs.items(), _parse_life)

    def _understood(
        self, key: str, entries: Iterable[Any], parse: Callable[[Any], _Parsed]
    ) -> list[_Parsed]:
        """The entries of a key that can be read; how many cannot is told when it has grown."""
        understood, strange = [], []
        for entry in entries:
            try:
                understood.append(parse(entry))
            except ValueError:
                strange.append(entry)
        if len(strange) > self._num_strange.get(key, 0):
            logger.warning("%d entries of %s cannot be read: %.100r", len(strange), key, strange)
        self._num_strange[key] = len(strange)
        return understood

    async def _load(self, life: Life) -> Delta:
        _, sequence_key, *tier_keys = _keys(life)
        async with _answering():
            sequence = _number(await self._redis.get(sequence_key))
        changes = []
        for bit, key in zip(_TIERS, tier_keys, strict=True):
            found = dict.fromkeys(await self._members(key))
            hashes = (member for member in found if len(member) == HASH_BYTES)
            changes.append(Change(bit, True, b"".join(hashes)))
        return Delta(life, None, sequence, tuple(changes))

    async def _members(self, key: str) -> list[bytes]:
        found: list[bytes] = []
        cursor = None
        while cursor != 0:
            async with _answering():
                cursor, part = await self._redis.sscan(key, cursor or 0, count=_SCAN_COUNT)
            found += part
        return found


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """One call inside. Raises StoreAway if Redis fails or takes too long."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise StoreAway(f"no answer within {_TIMEOUT_S:g} s") from error
    except RedisError as error:
        raise (StoreRefused if _is_refusal(error) else StoreAway)(str(error)) from error


def _is_refusal(error: RedisError) -> bool:
    """Whether a password, a user's rights, a database's number or a certificate is wrong."""
    if isinstance(error, ConnectionError):  # of these only a few are more than silence
        is_turned_away = isinstance(error, (AuthenticationError, AuthorizationError))
        return is_turned_away or isinstance(error.__context__, ssl.SSLCertVerificationError)
    return isinstance(error, ResponseError) and not isinstance(error, ClusterError)


async def _run(script: Any, keys: list[str], arguments: Sequence[str | bytes]) -> Any:
    async with _answering():
        return await script(keys=keys, args=arguments)


def _keys(life: Life) -> list[str]:
    names = ["sequence", *_TIERS.values()]
    prefix = _key_prefix(life.worker_id) + _digits(life.epoch)
    return [_EPOCHS, *(f"{prefix}:{name}" for name in names)]


def _head(life: Life) -> list[str | bytes]:
    prefix = _key_prefix(life.worker_id)
    return [life.worker_id, _digits(life.epoch), prefix, str(_KEEP_S)]


def _key_prefix(worker_id: str) -> str:
    return f"farspan:kv:v2:life:{worker_id}:"


def _over_member(life: Life, end: End) -> str:
    return f"{_digits(life.epoch)}:{end}:{life.worker_id}"


def _parse_over(member: bytes) -> tuple[Life, End]:
    epoch, end, worker_id = member.decode().split(":", 2)
    life = Life(worker_id, int(epoch))
    if events.is_ahead(life, time.time_ns()):
        raise ValueError(f"{life} begins in the far future")
    return life, End(end)


def _parse_life(entry: tuple[bytes, bytes]) -> Life:
    worker_id, epoch = entry
    return Life(worker_id.decode(), int(epoch))


def _number(digits: bytes | None) -> int:
    number = int(digits) if digits and len(digits) == 20 and digits.isdigit() else 0
    return number if number < 2**64 else 0


def _split(packed: bytes) -> Iterable[bytes]:
    return (packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))


def _digits(number: int) -> str:
    return f"{number:020}"
