"""The scripts that read and change catalogues in Redis; ``shared.py`` describes the names.

KEYS are ``of:OWNER``, ``sizes`` and ``totals``. ARGV begins with the prefix of all names, the owner, the catalogue's name and a
random stamp, with which the script signs its changes. A script returns false if there is no such catalogue.

A Redis without memory refuses a script whose first change may take some, and lets it go on after any other change. So scripts that
remove something begin with that.
"""

from __future__ import annotations

from gateway.redis.scripts import Script

MOST_CHANGES = 1000
"""Changes for which a gateway asks; after more, it drops all its copies of the catalogue. So as many removed ids and stamps are
kept."""
REMOVED_BYTES = 128
"""Bytes that a removed id takes besides its characters."""

_COMMON = """
local prefix, owner, name, stamp = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
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
local function sign(epoch, before)
    local version = redis.call('HGET', at(epoch, 'meta'), 'version')
    if version ~= before then
        redis.call('HSET', at(epoch, 'meta'), 'stamp', stamp)
        redis.call('RPUSH', at(epoch, 'stamps'), version .. '-' .. stamp)
        redis.call('LTRIM', at(epoch, 'stamps'), -1 - most_changes, -1)
    end
end
local function has_passed(epoch, version, signed)
    return redis.call('LPOS', at(epoch, 'stamps'), version .. '-' .. signed, 'RANK', -1)
end
local function remove(epoch, id, item_bytes)
    local record = redis.call('HGET', at(epoch, 'items'), id)
    redis.call('ZREM', at(epoch, 'log'), id)
    redis.call('ZREM', at(epoch, 'ends'), id)
    if not record then
        return 0
    end
    redis.call('HDEL', at(epoch, 'items'), id)
    local gone, meta = at(epoch, 'gone'), at(epoch, 'meta')
    redis.call('ZADD', gone, redis.call('HINCRBY', meta, 'version', 1), id)
    grow(epoch, -1, 0 - tokens_of(record), removed_bytes - item_bytes - #record)  -- a negated zero is no integer to Redis
    if redis.call('ZCARD', gone) > most_changes then
        local oldest = redis.call('ZRANGE', gone, 0, 0, 'WITHSCORES')
        redis.call('ZREM', gone, oldest[1])
        redis.call('HSET', meta, 'floor', oldest[2])
        grow(epoch, 0, 0, 0 - (removed_bytes + #oldest[1]))
    end
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
local before = epoch and redis.call('HGET', at(epoch, 'meta'), 'version')
"""


def _script(source: str) -> Script:
    constants = f"local most_changes, removed_bytes = {MOST_CHANGES}, {REMOVED_BYTES}"
    return Script("\n".join([constants, _COMMON.strip(), source.strip()]))


CREATE = _script("""
if epoch then
    return {0}
end
local full_of = full(tonumber(ARGV[7]), ARGV[8], ARGV[9])
if full_of > 0 then
    return {full_of}
end
redis.call('HSET', KEYS[1], name, ARGV[5])
redis.call('HSET', at(ARGV[5], 'meta'), 'spec', ARGV[6], 'version', 0, 'floor', 0)
redis.call('HINCRBY', KEYS[3], 'catalogues', 1)
grow(ARGV[5], 0, 0, tonumber(ARGV[7]))
sign(ARGV[5], false)
return {0}
""")
"""ARGV: epoch, spec, bytes of a catalogue, bounds of the owner and of all. Returns 0, or the bound that is reached: 1 is the
owner's, 2 is that of all."""

STATE = _script("""
if not epoch then
    return false
end
purge(epoch, ARGV[5], ARGV[6], tonumber(ARGV[7]))
sign(epoch, before)
local state = redis.call('HMGET', at(epoch, 'meta'), 'spec', 'version', 'items', 'bytes', 'tokens', 'warmed', 'warm_up')
if not state[1] then
    return false
end
return {epoch, unpack(state)}
""")
"""ARGV: time in milliseconds, most items to purge, bytes of an item. Returns epoch, spec, version, items, bytes, tokens, the warmed
version and the last warm-up."""

CHECK = _script("""
if not epoch then
    return false
end
local meta, gone = at(epoch, 'meta'), at(epoch, 'gone')
local version, floor, signed = unpack(redis.call('HMGET', meta, 'version', 'floor', 'stamp'))
if not version then
    return false
end
signed = signed or ''
local known, changed = ARGV[6], false
if epoch == ARGV[5] then
    if known == version and ARGV[7] == signed then
        changed = {}
    elseif tonumber(known) >= tonumber(floor) and has_passed(epoch, known, ARGV[7]) then
        changed = redis.call('ZRANGEBYSCORE', at(epoch, 'log'), '(' .. known, '+inf', 'LIMIT', 0, most_changes + 1)
        for _, id in ipairs(redis.call('ZRANGEBYSCORE', gone, '(' .. known, '+inf', 'LIMIT', 0, most_changes + 1)) do
            changed[#changed + 1] = id
        end
        if #changed > most_changes then
            changed = false
        end
    end
end
local totals = redis.call('HMGET', KEYS[3], 'catalogues', 'items', 'bytes')
return {epoch, version, signed, changed, totals[1] or 0, totals[2] or 0, totals[3] or 0}
""")
"""ARGV: the epoch, version and stamp that the gateway knows. Returns epoch, version, stamp, the ids that have changed since (false
if all may have), and the totals."""

READ = _script("""
local state = redis.call('HMGET', at(ARGV[5], 'meta'), 'version', 'stamp')
if not state[1] then
    return false
end
local same = state[1] == ARGV[7] and state[2] == ARGV[8] or has_passed(ARGV[5], ARGV[7], ARGV[8])
return {same and 1 or 0, read(ARGV[5], {unpack(ARGV, 9)}, tonumber(ARGV[6]))}
""")
"""ARGV: epoch, bytes after which no more is read, version and stamp that the gateway knows, ids. Returns whether the catalogue has,
or had, this version with this stamp, and the records of the first ids."""

PUT = _script("""
if not epoch or epoch ~= ARGV[5] then
    return false
end
local item_bytes, expires = tonumber(ARGV[8]), ARGV[9]
purge(epoch, ARGV[6], ARGV[7], item_bytes)
local items, log, ends, meta, gone = at(epoch, 'items'), at(epoch, 'log'), at(epoch, 'ends'), at(epoch, 'meta'), at(epoch, 'gone')
local stored, added, changed, full_of = 0, 0, 0, 0
for place = 12, #ARGV, 3 do
    local id, record, tokens = ARGV[place], ARGV[place + 1], tonumber(ARGV[place + 2])
    local known = redis.call('HGET', items, id)
    local same = known and string.sub(known, 1, 16) == string.sub(record, 1, 16)
    if not same or string.sub(known, 17, 24) ~= string.sub(record, 17, 24) then
        local removed = not known and redis.call('ZSCORE', gone, id) and removed_bytes + #id or 0
        local growth = known and #record - #known or item_bytes + #id + #record - removed
        full_of = full(growth, ARGV[10], ARGV[11])
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
        redis.call('ZADD', log, redis.call('HINCRBY', meta, 'version', 1), id)
        redis.call('ZREM', gone, id)
        if expires == '0' then
            redis.call('ZREM', ends, id)
        else
            redis.call('ZADD', ends, expires, id)
        end
    end
    stored = stored + 1
end
sign(epoch, before)
return {full_of, stored, added, changed, redis.call('HGET', meta, 'version')}
""")
"""ARGV: epoch, time, most items to purge, bytes of an item, expiry time, bounds of the owner and of all, and for each item id,
record and tokens. Returns the bound that is reached, the numbers of items stored, added and changed, and the version."""

PAGE = _script("""
if not epoch or (ARGV[5] ~= '' and epoch ~= ARGV[5]) then
    return false
end
local found = redis.call('ZRANGEBYSCORE', at(epoch, 'log'), '(' .. ARGV[7], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[8])
local ids, versions = {}, {}
for place = 1, #found, 2 do
    ids[#ids + 1] = found[place]
    versions[#versions + 1] = found[place + 1]
end
return {ids, versions, read(epoch, ids, tonumber(ARGV[6]))}
""")
"""ARGV: epoch or nothing, bytes after which no more is read, a version, most items. Returns ids and versions of the items that
changed after the version, and the records of the first of them."""

REMOVE = _script("""
if not epoch then
    return false
end
purge(epoch, ARGV[5], ARGV[6], tonumber(ARGV[7]))
local removed = 0
for place = 8, #ARGV do
    removed = removed + remove(epoch, ARGV[place], tonumber(ARGV[7]))
end
sign(epoch, before)
return removed
""")
"""ARGV: time, most items to purge, bytes of an item, ids. Returns how many there were."""

WARM_UP = _script("""
if not epoch or epoch ~= ARGV[5] then
    return false
end
redis.call('HSET', at(epoch, 'meta'), 'warm_up', ARGV[6])
if ARGV[7] ~= '' then
    redis.call('HSET', at(epoch, 'meta'), 'warmed', ARGV[7])
end
return 1
""")
"""ARGV: epoch, a warm-up, and the version that was warmed, or nothing."""

DELETE = _script("""
if not epoch then
    return false
end
local state = redis.call('HMGET', at(epoch, 'meta'), 'items', 'tokens', 'bytes')
redis.call('HDEL', KEYS[1], name)  -- first, because it takes no memory
grow(epoch, 0 - tonumber(state[1] or 0), 0, 0 - tonumber(state[3] or 0))
redis.call('HINCRBY', KEYS[3], 'catalogues', -1)
for _, what in ipairs({'meta', 'items', 'log', 'ends', 'gone', 'stamps'}) do
    redis.call('UNLINK', at(epoch, what))
end
return 1
""")
