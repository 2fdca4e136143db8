"""The steps of the copy in Redis, in Lua: each is taken whole or not at all."""

# Replicas of kv_index follow the same workers at different speeds. A step is taken only on exactly
# the state it builds on, so a slow replica cannot undo a fast one, whoever dies in between. Epochs
# are Unix nanoseconds, beyond Lua's exact integers: numbers are 20 digits and compare as text.
# ARGV: worker id, epoch, prefix of the worker's keys, seconds to keep.
# What no replica can have written counts as absent: another form, no uint64, or an epoch a day
# ahead of Redis's clock.
_BEGIN = """
local function number(text)
  local is_number = type(text) == 'string' and #text == 20 and not string.find(text, '%D')
  if is_number and text < '18446744073709551616' then return text end
end
local valid = redis.call('HGET', KEYS[1], ARGV[1])
local latest = string.format('%020.0f', (redis.call('TIME')[1] + 86400) * 1e9)
if number(valid) and valid > ARGV[2] and valid <= latest then return 'done' end
if valid ~= ARGV[2] then
  if valid then
    local old = ARGV[3] .. valid
    redis.call('UNLINK', old .. ':sequence', old .. ':device', old .. ':host')
  end
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
local at = number(redis.pcall('GET', KEYS[2])) or string.rep('0', 20)
"""
_END = """
for i = 2, 4 do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 'done'
"""

# ... previous sequence, sequence, then for each change a command, a key's number and its hashes.
APPEND = f"""{_BEGIN}
if at >= ARGV[6] then return 'done' end
if at ~= ARGV[5] then return 'behind' end
for c = 7, #ARGV, 3 do
  local packed = ARGV[c + 2]
  for i = 1, #packed, 16000 do
    local members = {{}}
    for j = i, math.min(i + 15999, #packed), 16 do
      members[#members + 1] = string.sub(packed, j, j + 15)
    end
    redis.call(ARGV[c], KEYS[tonumber(ARGV[c + 1])], unpack(members))
  end
end
redis.call('SET', KEYS[2], ARGV[6])
{_END}"""

# ... sequence. KEYS[5] and KEYS[6] are the sets to take over; one that is not there is empty.
REPLACE = f"""{_BEGIN}
if at > ARGV[5] then return 'done' end
for i = 3, 4 do
  redis.call('UNLINK', KEYS[i])
  if redis.call('EXISTS', KEYS[i + 2]) == 1 then redis.call('RENAME', KEYS[i + 2], KEYS[i]) end
end
redis.call('SET', KEYS[2], ARGV[5])
{_END}"""

RETIRE = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
"""
