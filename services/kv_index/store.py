"""The index's durable, shared copy in Redis: the only place that knows Redis.

farspan:kv:v1:epochs            hash  worker id -> epoch     a life is valid iff it stands here
farspan:kv:v1:life:{id}:{epoch} hash  block hash -> tiers    "1" device, "2" host, "3" both
                                      "sequence" -> the last batch that is in it
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.kv_index.events import GONE, Life
from services.kv_index.index import Delta
from shared.block_hash import HASH_BYTES, BlockHash

_EPOCHS = "farspan:kv:v1:epochs"
_SEQUENCE = b"sequence"  # 8 bytes, so it is no block hash
_SCAN_COUNT = 4096
_TIMEOUT_S = 5.0  # a whole life of a million blocks takes Redis about one second
_CONNECT_S = 1.0

# Replicas of kv_index follow the same workers at different speeds. A step is taken only on exactly
# the state it builds on, so a slow replica cannot undo a fast one, whoever dies in between. Epochs
# are Unix nanoseconds, beyond Lua's exact integers: numbers are 20 digits and compare as text.
_APPEND = """
local worker, epoch, previous, sequence, blocks = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local valid = redis.call('HGET', KEYS[1], worker)
if valid and valid > epoch then return 'done' end
if valid ~= epoch then
  if valid then redis.call('UNLINK', ARGV[6] .. valid) end
  redis.call('HSET', KEYS[1], worker, epoch)
end
local at = redis.call('HGET', KEYS[2], 'sequence') or string.rep('0', 20)
if previous == 'whole' then
  if at > sequence then return 'done' end
  redis.call('UNLINK', KEYS[2])
else
  if at >= sequence then return 'done' end
  if at ~= previous then return 'behind' end
end
for i = 1, #blocks, 17 do
  local tiers = string.sub(blocks, i + 16, i + 16)
  if tiers == '0' then
    redis.call('HDEL', KEYS[2], string.sub(blocks, i, i + 15))
  else
    redis.call('HSET', KEYS[2], string.sub(blocks, i, i + 15), tiers)
  end
end
redis.call('HSET', KEYS[2], 'sequence', sequence)
return 'done'
"""

_RETIRE = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
redis.call('UNLINK', KEYS[2])
"""


class StoreAway(Exception):
    """Redis did not do what it was asked; the message says why."""


class Store:
    """The durable copy. Every method raises StoreAway when Redis fails."""

    def __init__(self, url: str) -> None:
        # redis-py 8 retries for 4.5 to 6 s by default before it says that a port is closed.
        self._redis: Any = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_S,
        )

        self._append = self._redis.register_script(_APPEND)
        self._retire = self._redis.register_script(_RETIRE)
        self._url = url

    @property
    def place(self) -> str:
        """Where Redis is expected, without a password."""
        return urlsplit(self._url).netloc.rpartition("@")[2]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def load(self) -> list[Delta]:
        """Every valid life as it stands in the copy.

        Others may write meanwhile. The sequence is read before the blocks, so blocks are at least
        as new as it says, and replaying the events after it makes them exact.
        """
        try:
            return [await self._load(life) for life in await self._lives()]
        except RedisError as error:
            raise StoreAway(str(error)) from error

    async def append(self, delta: Delta) -> bool:
        """Add a step; False if the copy is behind it and needs the whole life."""
        keys = [_EPOCHS, _key(delta.life)]
        arguments: list[str | bytes] = [
            delta.life.worker_id,
            _digits(delta.life.epoch),
            "whole" if delta.previous is None else _digits(delta.previous),
            _digits(delta.sequence),
            b"".join(block_hash + b"%d" % bits for block_hash, bits in delta.blocks.items()),
            _key_prefix(delta.life.worker_id),
        ]
        return bool(await _run(self._append, keys, arguments) == b"done")

    async def retire(self, life: Life) -> None:
        """Remove a life, and its worker unless another life has begun."""
        await _run(self._retire, [_EPOCHS, _key(life)], [life.worker_id, _digits(life.epoch)])

    async def sequences(self, lives: Sequence[Life]) -> dict[Life, int]:
        """How far the copy is with each life; 0 for one it does not know."""
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for life in lives:
                pipeline.hget(_key(life), _SEQUENCE)
            pipeline.ping()  # also with no lives this shows whether Redis is there
            answers = await pipeline.execute()
        except RedisError as error:
            raise StoreAway(str(error)) from error
        return {life: int(answer or 0) for life, answer in zip(lives, answers, strict=False)}

    async def _lives(self) -> list[Life]:
        epochs: Mapping[bytes, bytes] = await self._redis.hgetall(_EPOCHS)
        return [Life(worker.decode(), int(epoch)) for worker, epoch in epochs.items()]

    async def _load(self, life: Life) -> Delta:
        sequence = int(await self._redis.hget(_key(life), _SEQUENCE) or 0)
        blocks: dict[BlockHash, int] = {}
        async for name, tiers in self._redis.hscan_iter(_key(life), count=_SCAN_COUNT):
            if len(name) == HASH_BYTES:
                blocks[BlockHash(name)] = int(tiers or GONE)
        return Delta(life, None, sequence, blocks)


async def _run(script: Any, keys: list[str], arguments: Sequence[str | bytes]) -> Any:
    try:
        return await script(keys=keys, args=arguments)
    except RedisError as error:
        raise StoreAway(str(error)) from error


def _key(life: Life) -> str:
    return _key_prefix(life.worker_id) + _digits(life.epoch)


def _key_prefix(worker_id: str) -> str:
    return f"farspan:kv:v1:life:{worker_id}:"


def _digits(number: int) -> str:
    return f"{number:020}"
