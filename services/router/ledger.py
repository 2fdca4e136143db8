"""The promises of all routers in Redis: the only place here that knows it.

farspan:router:v1:state         hash    "life" a random word, "version" its number of steps
farspan:router:v1:log           stream  8,192 entries <version>-0: "+", request id, its workers;
                                        or "-", request id
farspan:router:v1:turn          string  the router that lost too often: others wait, 0.1 s at most
farspan:router:v1:open          zset    request id by the end of its lease, for routers that start
farspan:router:v1:promise:{id}  string  15 digits of its making, a Reservation; has its lease
farspan:router:v1:prefix:{id}   string  the prompt's block hashes, while the index may not know them
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from shared import farspan_pb2 as pb
from shared.access import Access
from shared.redis_link import open_redis

_KEYS = (
    "farspan:router:v1:state",
    "farspan:router:v1:log",
    "farspan:router:v1:open",
    "farspan:router:v1:turn",
)
_MADE_DIGITS = 15
LONGEST_LEASE_S = 86_400.0
MAX_ENDED = 512  # in one step

# One step: tell what the caller does not know yet, then write what it did. A promise is written
# only if the caller knew every other one that could have changed its choice: those at its two
# workers, and those that compute the first block that it has to compute. Others make workers
# dearer that it did not choose. So routers decide as one would, and who loses again and again gets
# a turn. The end of a promise makes room and can be told late.
# After a flush the state has another life. Who hears all at once hears no hashes: they may be many,
# and of use for seconds only.
_STEP = """
local function promise(id) return 'farspan:router:v1:promise:' .. id end
local function prefix(id) return 'farspan:router:v1:prefix:' .. id end
local state, log, open, turn = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local life = redis.call('HGET', state, 'life')
if not life then
  redis.call('DEL', log, open)
  life = ARGV[1]
  redis.call('HSET', state, 'life', life, 'version', 0)
end
local version = tonumber(redis.call('HGET', state, 'version'))
local known = tonumber(ARGV[3])

local news, is_behind = {}, false
local function tell(id, hashes)
  local data = redis.call('GET', promise(id))
  if data then news[#news + 1] = {'+', id, data, hashes or ''} end
end
local mode, me, num_made, place = ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]) * 16
local function is_near(prefill, decode, hashes)
  if num_made == 0 then return false end
  local own = string.sub(ARGV[14], place + 1, place + 16)
  return prefill == ARGV[9] or decode == ARGV[10]
    or own ~= '' and hashes and own == string.sub(hashes, place + 1, place + 16)
end
local is_whole = ARGV[2] ~= life or known > version
if not is_whole and known < version then
  local entries = redis.call('XRANGE', log, string.format('%d-0', known + 1), '+')
  if #entries ~= version - known then
    is_whole = true
  else
    for _, entry in ipairs(entries) do
      local fields = entry[2]  -- names and values in turn
      local kind, id = fields[1], fields[2]
      if kind == '-' then
        news[#news + 1] = {'-', id}
      else
        local hashes = redis.call('GET', prefix(id))
        tell(id, hashes)
        is_behind = is_behind or is_near(fields[3], fields[4], hashes)
      end
    end
  end
end
if is_whole then
  redis.call('ZREMRANGEBYSCORE', open, '-inf', now)
  for _, id in ipairs(redis.call('ZRANGE', open, 0, -1)) do tell(id) end
  is_behind = true
end

local function note(...)
  version = version + 1
  redis.call('HSET', state, 'version', version)
  redis.call('XADD', log, 'MAXLEN', '~', 8192, string.format('%d-0', version), ...)
end
if mode == 'insist' then redis.call('SET', turn, me, 'NX', 'PX', 100) end
local whose = redis.call('GET', turn)
local is_written = mode == 'always' or not is_behind and (not whose or whose == me)
if is_written and whose == me then redis.call('DEL', turn) end
local at = 8
for _ = 1, num_made do
  local id, prefill, decode, lease, data, prefix_ms, hashes = unpack(ARGV, at, at + 6)
  at = at + 7
  if is_written then
    redis.call('SET', promise(id), string.format('%015d', now) .. data, 'PX', lease)
    if hashes ~= '' then redis.call('SET', prefix(id), hashes, 'PX', prefix_ms) end
    redis.call('ZADD', open, now + lease, id)
    note('+', id, prefill, decode)
  end
end
if num_made > 0 then redis.call('ZREMRANGEBYSCORE', open, '-inf', now) end
for each = at, #ARGV do
  local id = ARGV[each]
  if redis.call('DEL', promise(id)) == 1 then
    redis.call('DEL', prefix(id))
    redis.call('ZREM', open, id)
    note('-', id)
  end
end
return {life, version, is_whole and 1 or 0, is_written and 1 or 0, now, news}
"""


class LedgerAway(Exception):
    """Redis did not do what it was asked; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One promise as the ledger holds it."""

    request_id: str
    reservation: pb.Reservation
    block_hashes: bytes
    prefix_s: float = 0.0  # how long the hashes are of use
    age_s: float = 0.0  # since it was made, by Redis's clock


@dataclass(frozen=True)
class News:
    """What a step told: other routers' doings since the last one, and whether ours was written."""

    is_written: bool
    is_whole: bool = False  # `made` is all there is
    is_new_life: bool = False  # Redis had lost everything
    changes: Sequence["Entry | str"] = field(default_factory=tuple)  # made, or the id of an ended


class Ledger:
    """One router's view of the ledger. Every step raises LedgerAway when Redis fails."""

    def __init__(self, url: str, access: Access, timeout_s: float) -> None:
        """Raises ConfigError if the URL or the files cannot be used."""
        self._redis = open_redis(url, access, connect_timeout_s=timeout_s)
        self._step = self._redis.register_script(_STEP)
        self._timeout_s = timeout_s
        self._id = uuid.uuid4().hex
        self._life = b""
        self._version = 0

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def make(
        self,
        entry: Entry,
        ended: Sequence[str] = (),
        *,
        num_hit_blocks: int = 0,
        is_insisting: bool = False,
    ) -> News:
        """Write a promise if none near it was made since the last step, and end others anyway.

        Who insists is first next time.
        """
        mode = "insist" if is_insisting else "if-current"
        return await self._run(mode, [entry], ended, num_hit_blocks)

    async def exchange(self, made: Sequence[Entry], ended: Sequence[str]) -> News:
        """Write promises in any case, end others, and hear what is new."""
        return await self._run("always", made, ended)

    async def _run(
        self, mode: str, made: Sequence[Entry], ended: Sequence[str], num_hit_blocks: int = 0
    ) -> News:
        arguments: list[str | bytes | int] = [
            uuid.uuid4().hex,
            self._life or "none",
            self._version,
            mode,
            self._id,
            len(made),
            num_hit_blocks,
        ]
        for entry in made:
            arguments += _fields(entry)
        arguments += ended
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._step(keys=_KEYS, args=arguments)
        except TimeoutError as error:
            raise LedgerAway(f"no answer within {self._timeout_s:g} s") from error
        except RedisError as error:
            raise LedgerAway(str(error) or type(error).__name__) from error
        life, version, is_whole, is_written, now_ms, changes = answer
        is_new_life = self._life not in (b"", life)
        self._life, self._version = life, version
        return News(
            bool(is_written),
            bool(is_whole),
            is_new_life,
            [_change(each, now_ms) for each in changes],
        )


@asynccontextmanager
async def opened(url: str, access: Access, timeout_s: float) -> AsyncIterator[Ledger | None]:
    """Where promises are shared; None without a URL: this router is the only one."""
    if not url:
        yield None
        return
    async with aclosing(Ledger(url, access, timeout_s)) as ledger:
        yield ledger


def _fields(entry: Entry) -> list[str | bytes | int]:
    lease_ms = max(1, min(entry.reservation.lifetime_ms, int(LONGEST_LEASE_S * 1000)))
    prefix_ms = max(1, min(lease_ms, int(entry.prefix_s * 1000)))
    data = entry.reservation.SerializeToString()
    prefill, decode = entry.reservation.prefill.worker_id, entry.reservation.decode.worker_id
    return [entry.request_id, prefill, decode, lease_ms, data, prefix_ms, entry.block_hashes]


def _change(change: Sequence[bytes], now_ms: int) -> Entry | str:
    kind, request_id, *rest = change
    if kind == b"-":
        return request_id.decode()
    data, block_hashes = rest
    made_ms = int(data[:_MADE_DIGITS])
    return Entry(
        request_id.decode(),
        pb.Reservation.FromString(data[_MADE_DIGITS:]),
        block_hashes,
        age_s=max(0, now_ms - made_ms) / 1000,
    )
