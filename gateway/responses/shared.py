"""The store of responses in Redis, shared by all gateways.

All names have the hash tag ``{responses}``, so that one script call, in one slot of a cluster, keeps the bounds:

=====================================  ==========================================================================
``PREFIX:{responses}:at:TENANT:ID``    one response, as msgpack; expires
``PREFIX:{responses}:ages``            sorted set of ``TENANT:ID``, scored by expiry time in milliseconds
``PREFIX:{responses}:ages:TENANT``     the same for one tenant
``PREFIX:{responses}:sizes``           hash: bytes of each ``TENANT:ID``
``PREFIX:{responses}:tenants``         sorted set of tenants, scored by their bytes
``PREFIX:{responses}:counts``          the same, scored by their number of responses
``PREFIX:{responses}:bytes``           bytes of all responses
=====================================  ==========================================================================
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.redis.link import Link, RedisAway
from gateway.redis.scripts import Script
from gateway.responses.store import Stored, Unavailable
from gateway.settings import ResponseBounds

SECONDS = 1.0
"""Longest wait for Redis. A response that cannot be read or stored fails a request, so this is longer than for a cached result."""
REMOVED_AT_ONCE = 256
"""Most entries that one call removes, which takes Redis about a millisecond."""

# KEYS: ages, sizes, tenants, bytes, ages of the tenant, counts. ARGV: prefix of the names, tenant, id, value ("" removes the
# response), its size, most entries, most bytes, time to live in milliseconds, most entries to remove. Returns 1 if the response
# was stored or removed, and 0 if there is no room or none to remove.
_CHANGE = Script(
    """
    local prefix, tenant, id = ARGV[1], ARGV[2], ARGV[3]
    local function count(owner)
        local entries = redis.call('ZCARD', prefix .. 'ages:' .. owner)
        if entries > 0 then
            redis.call('ZADD', KEYS[6], entries, owner)
        else
            redis.call('ZREM', KEYS[6], owner)
        end
    end
    local function remove(member)
        local owner = string.match(member, '^(.*):[^:]*$')
        local size = tonumber(redis.call('HGET', KEYS[2], member) or 0)
        redis.call('ZREM', KEYS[1], member)
        redis.call('ZREM', prefix .. 'ages:' .. owner, member)
        count(owner)
        redis.call('HDEL', KEYS[2], member)
        if tonumber(redis.call('ZINCRBY', KEYS[3], -size, owner)) <= 0 then
            redis.call('ZREM', KEYS[3], owner)
        end
        redis.call('DECRBY', KEYS[4], size)
        return redis.call('DEL', prefix .. 'at:' .. member)
    end
    local member = tenant .. ':' .. id
    if ARGV[4] == '' then
        return remove(member)
    end
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[9])) do
        remove(old)
    end
    local size, removed = tonumber(ARGV[5]), 0
    local function full()
        if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[6]) then
            return KEYS[6]
        end
        return tonumber(redis.call('GET', KEYS[4]) or 0) + size > tonumber(ARGV[7]) and KEYS[3]
    end
    while full() do  -- an earlier version wrote no counts
        local largest = redis.call('ZREVRANGE', full(), 0, 0)[1] or redis.call('ZREVRANGE', KEYS[3], 0, 0)[1]
        local oldest = largest and redis.call('ZRANGE', prefix .. 'ages:' .. largest, 0, 0)[1]
        if not oldest or removed >= tonumber(ARGV[9]) then
            return 0
        end
        remove(oldest)
        removed = removed + 1
    end
    redis.call('SET', prefix .. 'at:' .. member, ARGV[4], 'PX', ARGV[8])
    redis.call('ZADD', KEYS[1], now + ARGV[8], member)
    redis.call('ZADD', KEYS[5], now + ARGV[8], member)
    count(tenant)
    redis.call('HSET', KEYS[2], member, size)
    redis.call('ZINCRBY', KEYS[3], size, tenant)
    redis.call('INCRBY', KEYS[4], size)
    return 1
    """
)

_decoder = msgspec.msgpack.Decoder(Stored)


class RedisStore:
    """A store in Redis. While Redis is away, nothing is stored or found."""

    def __init__(self, link: Link, bounds: ResponseBounds, *, prefix: str) -> None:
        self._link = link
        self._bounds = bounds
        self._prefix = f"{prefix}:{{responses}}:"

    def check(self) -> None:
        """See :class:`ResponseStore`."""
        if self._link.is_open:
            raise Unavailable

    async def get(self, tenant: str, id: str) -> Stored | None:
        """See :class:`ResponseStore`."""
        name = f"{self._prefix}at:{tenant}:{id}"
        value = await self._ask(lambda: self._link.client.execute_command("GET", name))
        return None if value is None else _decoder.decode(value)

    async def put(self, tenant: str, id: str, stored: Stored) -> bool:
        """See :class:`ResponseStore`."""
        if stored.size > self._bounds.bytes or not self._bounds.entries:
            return False
        return bool(await self._change(tenant, id, msgspec.msgpack.encode(stored), stored.size))

    async def delete(self, tenant: str, id: str) -> bool:
        """See :class:`ResponseStore`."""
        return bool(await self._change(tenant, id, b"", 0))

    async def _change(self, tenant: str, id: str, value: bytes, size: int) -> Any:
        names = [f"{self._prefix}{name}" for name in ("ages", "sizes", "tenants", "bytes", f"ages:{tenant}", "counts")]
        most = (self._bounds.entries, self._bounds.bytes, int(self._bounds.seconds * 1000), REMOVED_AT_ONCE)
        return await self._ask(lambda: _CHANGE(self._link.client, names, [self._prefix, tenant, id, value, size, *most]))

    async def _ask(self, command: Any) -> Any:
        """Run a command. Raises :class:`Unavailable`."""
        try:
            return await self._link.ask(command, seconds=SECONDS)
        except RedisAway:
            raise Unavailable from None
