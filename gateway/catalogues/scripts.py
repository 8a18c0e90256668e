"""The scripts that read and change catalogues in Redis; ``shared.py`` describes the names.

KEYS are ``of:OWNER``, ``sizes`` and ``totals``. ARGV begins with the prefix of all names, the owner and the catalogue's name. A
script returns false if there is no such catalogue.
"""

from __future__ import annotations

from gateway.redis.scripts import Script

_COMMON = """
local prefix, owner, name = ARGV[1], ARGV[2], ARGV[3]
local function at(epoch, what)
    return prefix .. 'at:' .. owner .. ':' .. epoch .. ':' .. what
end
local function grow(epoch, items, tokens, bytes)
    local meta = at(epoch, 'meta')
    redis.call('HINCRBY', meta, 'items', items)
    redis.call('HINCRBY', meta, 'tokens', tokens)
    redis.call('HINCRBY', meta, 'bytes', bytes)
    redis.call('HINCRBY', KEYS[3], 'items', items)
    redis.call('HINCRBY', KEYS[3], 'bytes', bytes)
    if redis.call('HINCRBY', KEYS[2], owner, bytes) <= 0 then
        redis.call('HDEL', KEYS[2], owner)
    end
end
local function full(growth, group, all)
    if growth <= 0 then
        return 0
    elseif tonumber(redis.call('HGET', KEYS[2], owner) or 0) + growth > tonumber(group) then
        return 1
    elseif tonumber(redis.call('HGET', KEYS[3], 'bytes') or 0) + growth > tonumber(all) then
        return 2
    end
    return 0
end
local function tokens_of(record)
    return (struct.unpack('<I4', string.sub(record, 25, 28)))
end
local function remove(epoch, id, item_bytes)
    local record = redis.call('HGET', at(epoch, 'items'), id)
    redis.call('ZREM', at(epoch, 'log'), id)
    redis.call('ZREM', at(epoch, 'ends'), id)
    if not record then
        return 0
    end
    redis.call('HDEL', at(epoch, 'items'), id)
    grow(epoch, -1, 0 - tokens_of(record), 0 - (item_bytes + #id + #record))  -- a negated zero is no integer to Redis
    local version = redis.call('HINCRBY', at(epoch, 'meta'), 'version', 1)
    redis.call('HSET', at(epoch, 'meta'), 'floor', version)
    return 1
end
local function purge(epoch, now, most, item_bytes)
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', at(epoch, 'ends'), '-inf', now, 'LIMIT', 0, most)) do
        remove(epoch, id, item_bytes)
    end
end
local function read(epoch, ids, most)
    local records, size = {}, 0
    for place, id in ipairs(ids) do
        local record = redis.call('HGET', at(epoch, 'items'), id)
        records[place] = record
        size = size + (record and #record or 0)
        if size > most then
            break
        end
    end
    return records
end
local epoch = redis.call('HGET', KEYS[1], name)
"""


def _script(source: str) -> Script:
    return Script(_COMMON.strip() + "\n" + source.strip())


CREATE = _script("""
if epoch then
    return {0}
end
local full_of = full(tonumber(ARGV[6]), ARGV[7], ARGV[8])
if full_of > 0 then
    return {full_of}
end
redis.call('HSET', KEYS[1], name, ARGV[4])
redis.call('HSET', at(ARGV[4], 'meta'), 'spec', ARGV[5], 'version', 0, 'floor', 0)
redis.call('HINCRBY', KEYS[3], 'catalogues', 1)
grow(ARGV[4], 0, 0, tonumber(ARGV[6]))
return {0}
""")
"""ARGV: epoch, spec, bytes of a catalogue, bounds of the owner and of all. Returns 0, or the bound that is reached: 1 is the
owner's, 2 is that of all."""

STATE = _script("""
if not epoch then
    return false
end
purge(epoch, ARGV[4], ARGV[5], tonumber(ARGV[6]))
local state = redis.call('HMGET', at(epoch, 'meta'), 'spec', 'version', 'items', 'bytes', 'tokens', 'warmed')
if not state[1] then
    return false
end
return {epoch, unpack(state)}
""")
"""ARGV: time in milliseconds, most items to purge, bytes of an item. Returns epoch, spec, version, items, bytes, tokens, warmed."""

CHECK = _script("""
if not epoch then
    return false
end
local state = redis.call('HMGET', at(epoch, 'meta'), 'version', 'floor')
if not state[1] then
    return false
end
local known, changed = tonumber(ARGV[5]), false
if epoch == ARGV[4] then
    if known == tonumber(state[1]) then
        changed = {}
    elseif known >= tonumber(state[2]) and known < tonumber(state[1]) then
        changed = redis.call('ZRANGEBYSCORE', at(epoch, 'log'), '(' .. known, '+inf', 'LIMIT', 0, ARGV[6] + 1)
        if #changed > tonumber(ARGV[6]) then
            changed = false
        end
    end
end
local totals = redis.call('HMGET', KEYS[3], 'catalogues', 'items', 'bytes')
return {epoch, state[1], changed, totals[1] or 0, totals[2] or 0, totals[3] or 0}
""")
"""ARGV: the epoch and version that the gateway knows, most changes. Returns epoch, version, the ids that have changed since (false
if all may have), and the totals."""

READ = _script("""
local meta = at(ARGV[4], 'meta')
local version = redis.call('HGET', meta, 'version')
if not version then
    return false
end
return {version, read(ARGV[4], {unpack(ARGV, 6)}, tonumber(ARGV[5]))}
""")
"""ARGV: epoch, bytes after which no more is read, ids. Returns the version, and the records of the first ids."""

PUT = _script("""
if not epoch or epoch ~= ARGV[4] then
    return false
end
local item_bytes, expires = tonumber(ARGV[7]), ARGV[8]
purge(epoch, ARGV[5], ARGV[6], item_bytes)
local items, log, ends, meta = at(epoch, 'items'), at(epoch, 'log'), at(epoch, 'ends'), at(epoch, 'meta')
local version = tonumber(redis.call('HGET', meta, 'version') or 0)
local stored, added, changed, full_of = 0, 0, 0, 0
for place = 11, #ARGV, 3 do
    local id, record, tokens = ARGV[place], ARGV[place + 1], tonumber(ARGV[place + 2])
    local known = redis.call('HGET', items, id)
    local same = known and string.sub(known, 1, 16) == string.sub(record, 1, 16)
    if not same or string.sub(known, 17, 24) ~= string.sub(record, 17, 24) then
        local growth = known and #record - #known or item_bytes + #id + #record
        full_of = full(growth, ARGV[9], ARGV[10])
        if full_of > 0 then
            break
        end
        if not known then
            added = added + 1
        elseif not same then
            changed = changed + 1
        end
        redis.call('HSET', items, id, record)
        grow(epoch, known and 0 or 1, tokens - (known and tokens_of(known) or 0), growth)
        version = redis.call('HINCRBY', meta, 'version', 1)
        redis.call('ZADD', log, version, id)
        if expires == '0' then
            redis.call('ZREM', ends, id)
        else
            redis.call('ZADD', ends, expires, id)
        end
    end
    stored = stored + 1
end
return {full_of, stored, added, changed, version}
""")
"""ARGV: epoch, time, most items to purge, bytes of an item, expiry time, bounds of the owner and of all, and for each item id,
record and tokens. Returns the bound that is reached, the numbers of items stored, added and changed, and the version."""

PAGE = _script("""
if not epoch or (ARGV[4] ~= '' and epoch ~= ARGV[4]) then
    return false
end
local found = redis.call('ZRANGEBYSCORE', at(epoch, 'log'), '(' .. ARGV[6], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[7])
local ids, versions = {}, {}
for place = 1, #found, 2 do
    ids[#ids + 1] = found[place]
    versions[#versions + 1] = found[place + 1]
end
return {ids, versions, read(epoch, ids, tonumber(ARGV[5]))}
""")
"""ARGV: epoch or nothing, bytes after which no more is read, a version, most items. Returns ids and versions of the items that
changed after the version, and the records of the first of them."""

REMOVE = _script("""
if not epoch then
    return false
end
purge(epoch, ARGV[4], ARGV[5], tonumber(ARGV[6]))
local removed = 0
for place = 7, #ARGV do
    removed = removed + remove(epoch, ARGV[place], tonumber(ARGV[6]))
end
return removed
""")
"""ARGV: time, most items to purge, bytes of an item, ids. Returns how many there were."""

DELETE = _script("""
if not epoch then
    return false
end
local state = redis.call('HMGET', at(epoch, 'meta'), 'items', 'tokens', 'bytes')
grow(epoch, 0 - tonumber(state[1] or 0), 0, 0 - tonumber(state[3] or 0))
redis.call('HINCRBY', KEYS[3], 'catalogues', -1)
redis.call('HDEL', KEYS[1], name)
redis.call('UNLINK', at(epoch, 'meta'), at(epoch, 'items'), at(epoch, 'log'), at(epoch, 'ends'))
return 1
""")
