"""The store in Redis, shared by all gateways.

A cached value has the name ``PREFIX:score:`` and the 16 bytes of its key. It expires, with jitter so that values written together
do not expire together, and Redis may evict it. A lookup is one MGET within the link's time limit; writes happen in the background:
one script call stores the values of many requests, from a queue that drops values when it is full.

Kept values have names that begin with ``PREFIX:{SPACE}:``. The hash tag keeps a space in one slot of a cluster, so that one script
call keeps its bounds:

=========================  =============================================================================================
``at:OWNER:BOX:box``       hash: head, epoch, version, ttl in microseconds, bytes, value_bytes
``at:OWNER:BOX:entries``   hash: value of each entry, by name
``at:OWNER:BOX:log``       sorted set of names, scored by the version of their last change
``of:OWNER``               hash: epoch of each box that was created, by name
``ends``                   sorted set of ``OWNER:BOX``, scored by the time when all entries of the box have expired
``bytes``, ``counts``      sorted sets of owners, scored by their bytes and their number of entries
``totals``                 hash: boxes, entries and bytes of all owners
=========================  =============================================================================================
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from redis.asyncio import RedisCluster

from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.process.event_loop import end_tasks
from yardstick_llm.gateway.store.base import (
    READ_BYTES,
    REMOVED_AT_ONCE,
    Box,
    Found,
    Full,
    Missing,
    Page,
    Space,
    Totals,
    Unavailable,
    Written,
)
from yardstick_llm.gateway.store.link import Link, RedisAway, RedisFull, Script

KEPT_SECONDS = 1.0
"""Longest wait for Redis of a request for kept values. It fails without them, so this is longer than for cached ones."""
ENTRIES_AT_ONCE = 200
"""Entries of one call of a script, which takes Redis about a millisecond."""
QUEUE_VALUES, QUEUE_BYTES = 20_000, 4 << 20
"""Most values, and most of their bytes, that wait to be written."""
BATCH_VALUES, BATCH_BYTES = 500, 1 << 17
"""Most values of one write, and about the most bytes; Redis needs about a millisecond for it."""
GATHER_SECONDS = 0.005
"""Delay of a write that gathers further values. No request waits for a write, and one large write needs less CPU time."""
WRITE_SECONDS = 1.0
JITTER = 0.1
"""Largest relative change of a cached value's time to live, in both directions."""

# KEYS: names. ARGV: the values; the time to live in milliseconds; its jitter.
_CACHE = Script(
    """
    for i = 1, #KEYS do
        local spread = 1 + ARGV[#KEYS + 2] * (string.byte(KEYS[i], -1) / 127.5 - 1)
        redis.call('SET', KEYS[i], ARGV[i], 'PX', math.max(1, math.floor(ARGV[#KEYS + 1] * spread)))
    end
    """
)

# KEYS: totals, which names the slot. ARGV begins with the prefix of all names, the owner, the box, and the epoch that it must have
# ('': any). Each script returns the totals and then what `run` returns, or nothing if there is no such box.
#
# A Redis without memory refuses a script whose first change may take some, and lets it go on after any other change. So what
# removes something begins with HDEL.
_COMMON = """
local prefix, owner, box, epoch = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function text(number)
    return string.format('%.0f', number)
end
local function at(owner, box, what)
    return prefix .. 'at:' .. owner .. ':' .. box .. ':' .. what
end
local function exists()
    local found = redis.call('HGET', at(owner, box, 'box'), 'epoch')
    return found and (epoch == '' or found == epoch)
end
local function count(owner, box, entries, bytes, value_bytes)
    redis.call('HINCRBY', at(owner, box, 'box'), 'bytes', text(bytes))
    redis.call('HINCRBY', at(owner, box, 'box'), 'value_bytes', text(value_bytes))
    redis.call('HINCRBY', prefix .. 'totals', 'entries', text(entries))
    redis.call('HINCRBY', prefix .. 'totals', 'bytes', text(bytes))
    for name, change in pairs({counts = entries, bytes = bytes}) do
        if tonumber(redis.call('ZINCRBY', prefix .. name, text(change), owner)) <= 0 then
            redis.call('ZREM', prefix .. name, owner)
        end
    end
end
local function next_version(owner, box)
    local version = tonumber(redis.call('HGET', at(owner, box, 'box'), 'version') or 0)
    version = text(math.max(now, version + 1))
    redis.call('HSET', at(owner, box, 'box'), 'version', version)
    return version
end
local function remove(owner, box, name, entry_bytes)
    local value = redis.call('HGET', at(owner, box, 'entries'), name)
    if not value then
        return 0
    end
    redis.call('HDEL', at(owner, box, 'entries'), name)
    redis.call('ZREM', at(owner, box, 'log'), name)
    next_version(owner, box)
    count(owner, box, -1, -(entry_bytes + #name + #value), -#value)
    return 1
end
local function expired_before(owner, box)
    local ttl = tonumber(redis.call('HGET', at(owner, box, 'box'), 'ttl') or 0)
    return ttl > 0 and now - ttl or 0
end
local function purge(owner, box, entry_bytes)
    local before = expired_before(owner, box)
    if before > 0 then
        local names = redis.call('ZRANGEBYSCORE', at(owner, box, 'log'), '-inf', text(before), 'LIMIT', 0, REMOVED_AT_ONCE)
        for _, name in ipairs(names) do
            remove(owner, box, name, entry_bytes)
        end
    end
end
local function full(bytes, entries, most_bytes, owner_bytes, most_entries)
    local totals = redis.call('HMGET', prefix .. 'totals', 'entries', 'bytes')
    if bytes > 0 and owner_bytes >= 0 and tonumber(redis.call('ZSCORE', prefix .. 'bytes', owner) or 0) + bytes > owner_bytes then
        return 1
    elseif entries > 0 and tonumber(totals[1] or 0) + entries > most_entries then
        return 2
    elseif bytes > 0 and tonumber(totals[2] or 0) + bytes > most_bytes then
        return 3
    end
    return 0
end
"""
_TOTALS = """
local totals = redis.call('HMGET', prefix .. 'totals', 'boxes', 'entries', 'bytes')
return {totals[1] or 0, totals[2] or 0, totals[3] or 0, found}
"""


def _script(run: str, *, creates: bool = False) -> Script:
    """Return a script whose function ``run`` has the body given. ``creates``: it runs also if there is no such box."""
    common = _COMMON.replace("REMOVED_AT_ONCE", str(REMOVED_AT_ONCE)).strip()
    found = f"local found = {'run()' if creates else 'exists() and run()'}"
    return Script("\n".join([common, "local function run()", run.strip(), "end", found, _TOTALS.strip()]))


# ARGV: head, new epoch, time to live, and of the space: bytes of a box, most bytes, most bytes of an owner (-1: all). Returns the
# bound that is reached: 1 is the owner's, 3 is that of all, 0 is none.
_CREATE = _script(
    """
    if redis.call('HEXISTS', prefix .. 'of:' .. owner, box) == 1 then
        return 0
    end
    local full_of = full(tonumber(ARGV[8]), 0, tonumber(ARGV[9]), tonumber(ARGV[10]), 0)
    if full_of > 0 then
        return full_of
    end
    redis.call('HSET', prefix .. 'of:' .. owner, box, ARGV[6])
    redis.call('HSET', at(owner, box, 'box'), 'head', ARGV[5], 'epoch', ARGV[6], 'ttl', ARGV[7], 'version', 0)
    redis.call('HINCRBY', prefix .. 'totals', 'boxes', 1)
    count(owner, box, 0, tonumber(ARGV[8]), 0)
    return 0
""",
    creates=True,
)

# ARGV: bytes of an entry. Returns head, epoch, version, bytes, bytes of values, number of entries.
_DESCRIBE = _script("""
    purge(owner, box, tonumber(ARGV[5]))
    local found = redis.call('HMGET', at(owner, box, 'box'), 'head', 'epoch', 'version', 'bytes', 'value_bytes')
    found[6] = redis.call('HLEN', at(owner, box, 'entries'))
    return found
""")

_DELETE = _script("""
    redis.call('HDEL', prefix .. 'of:' .. owner, box)  -- first, because it takes no memory
    local bytes = tonumber(redis.call('HGET', at(owner, box, 'box'), 'bytes'))
    count(owner, box, -redis.call('HLEN', at(owner, box, 'entries')), -bytes, 0)
    redis.call('HINCRBY', prefix .. 'totals', 'boxes', -1)
    redis.call('ZREM', prefix .. 'ends', owner .. ':' .. box)
    redis.call('UNLINK', at(owner, box, 'box'), at(owner, box, 'entries'), at(owner, box, 'log'))
    return 1
""")

# ARGV: time to live of a box that is missing (-1: it is not created), and of the space: bytes of an entry, most bytes, most bytes
# of an owner, most entries, whether it evicts; then names and values. Returns the bound that is reached, as `full` does, the
# numbers of entries stored, added and changed, and the version.
_PUT = _script(
    """
    local entry_bytes, most_bytes, owner_bytes = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
    local most_entries, evicts = tonumber(ARGV[9]), ARGV[10] == '1'
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'ends', '-inf', text(now), 'LIMIT', 0, 4)) do
        local of, name = string.match(member, '^(.*):([^:]*)$')
        purge(of, name, entry_bytes)
        if redis.call('HLEN', at(of, name, 'entries')) == 0 then
            redis.call('ZREM', prefix .. 'ends', member)
        end
    end
    if not exists() then
        if ARGV[5] == '-1' then
            return false
        end
        redis.call('HSET', at(owner, box, 'box'), 'head', '', 'epoch', '', 'ttl', ARGV[5], 'version', 0)
    end
    purge(owner, box, entry_bytes)
    local entries, log = at(owner, box, 'entries'), at(owner, box, 'log')
    local ttl = tonumber(redis.call('HGET', at(owner, box, 'box'), 'ttl'))
    local stored, added, changed, full_of, removed = 0, 0, 0, 0, 0
    for place = 11, #ARGV, 2 do
        local name, value = ARGV[place], ARGV[place + 1]
        local known = redis.call('HGET', entries, name)
        if known ~= value or ttl > 0 then
            local growth = known and #value - #known or entry_bytes + #name + #value
            full_of = full(growth, known and 0 or 1, most_bytes, owner_bytes, most_entries)
            while full_of > 1 and evicts and removed < REMOVED do
                local largest = redis.call('ZREVRANGE', prefix .. (full_of == 2 and 'counts' or 'bytes'), 0, 0)[1]
                local oldest = largest and redis.call('ZRANGE', at(largest, '', 'log'), 0, 0)[1]
                if not oldest then
                    break
                end
                remove(largest, '', oldest, entry_bytes)
                removed = removed + 1
                full_of = full(growth, 1, most_bytes, owner_bytes, most_entries)
            end
            if full_of > 0 then
                break
            end
            redis.call('HSET', entries, name, value)
            redis.call('ZADD', log, next_version(owner, box), name)
            count(owner, box, known and 0 or 1, growth, #value - (known and #known or 0))
            if not known then
                added = added + 1
            elseif known ~= value then
                changed = changed + 1
            end
        end
        stored = stored + 1
    end
    if ttl > 0 then
        redis.call('ZADD', prefix .. 'ends', text(now + ttl), owner .. ':' .. box)
    end
    return {full_of, stored, added, changed, redis.call('HGET', at(owner, box, 'box'), 'version')}
""".replace("REMOVED", str(REMOVED_AT_ONCE)),
    creates=True,
)

# ARGV: bytes after which no more is read, names. Returns head, epoch, and the values of the first names.
_GET = _script("""
    local before, values, size = expired_before(owner, box), {}, 0
    for place = 6, #ARGV do
        local value = redis.call('HGET', at(owner, box, 'entries'), ARGV[place])
        if value and before > 0 and tonumber(redis.call('ZSCORE', at(owner, box, 'log'), ARGV[place])) <= before then
            value = false
        end
        values[#values + 1] = value
        size = size + (value and #value or 0)
        if size > tonumber(ARGV[5]) then
            break
        end
    end
    local found = redis.call('HMGET', at(owner, box, 'box'), 'head', 'epoch')
    return {found[1], found[2], values}
""")

# ARGV: bytes after which no more is read, version, most entries. Returns names, versions and values of entries after the version.
_PAGE = _script("""
    local after = math.max(tonumber(ARGV[6]), expired_before(owner, box))
    local log = redis.call('ZRANGEBYSCORE', at(owner, box, 'log'), '(' .. text(after), '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[7])
    local names, versions, values, size = {}, {}, {}, 0
    for place = 1, #log, 2 do
        if size > tonumber(ARGV[5]) then
            break
        end
        local value = redis.call('HGET', at(owner, box, 'entries'), log[place])
        names[#names + 1], versions[#versions + 1], values[#values + 1] = log[place], text(tonumber(log[place + 1])), value
        size = size + #value
    end
    return {names, versions, values}
""")

# ARGV: bytes of an entry, names. Returns how many there were.
_REMOVE = _script("""
    purge(owner, box, tonumber(ARGV[5]))
    local removed = 0
    for place = 6, #ARGV do
        removed = removed + remove(owner, box, ARGV[place], tonumber(ARGV[5]))
    end
    return removed
""")


class RedisStore:
    """A :class:`~gateway.store.base.Store` in Redis. Cached values are written between :meth:`start` and :meth:`stop`."""

    def __init__(self, link: Link, telemetry: Telemetry, *, prefix: str, cache_seconds: float) -> None:
        """``cache_seconds``: time for which cached values are kept."""
        self._link = link
        self._telemetry = telemetry
        self._prefix = prefix
        self._cache_ms = cache_seconds * 1000
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._filled = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._totals: dict[str, Totals] = {}

    def start(self) -> None:
        """Start writing queued values."""
        self._writer = asyncio.create_task(self._keep_writing())

    async def stop(self) -> None:
        """Stop the background task and write the queued values."""
        await end_tasks(self._writer)
        while self._queue:
            await self._write()

    async def cached(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See :class:`Store`. In a cluster, this is one MGET per slot, pipelined per node, on all nodes at once. A hash tag could
        place related names in one slot, but the only common part of prompts that a name could use is the model, and a tag of it
        would put all results of a model on one node."""
        if not keys:
            return []
        client, names = self._link.client, [self._cached_name(key) for key in keys]
        try:
            if isinstance(client, RedisCluster):
                return await self._link.ask(lambda: client.mget_nonatomic(names))
            plain: Any = client
            values: list[bytes | None] = await self._link.ask(lambda: plain.execute_command("MGET", *names))
            return values
        except RedisAway:
            return [None] * len(keys)

    async def cache(self, values: Mapping[bytes, bytes]) -> None:
        """See :class:`Store`. Values beyond the queue's room, or while Redis is away, are dropped."""
        dropped = 0
        for key, value in values.items():
            if self._link.is_open or len(self._queue) >= QUEUE_VALUES or self._queued_bytes + len(value) > QUEUE_BYTES:
                dropped += 1
            else:
                self._queue.append((key, value))
                self._queued_bytes += len(value)
        if dropped:
            self._telemetry.cache_writes.labels("dropped").inc(dropped)
        self._filled.set()

    async def check(self) -> None:
        """See :class:`Store`."""
        if self._link.is_open:
            await self._ask(lambda: self._link.client.execute_command("PING"))

    async def create(self, space: Space, owner: str, box: str, head: bytes, *, seconds: float = 0) -> None:
        """See :class:`Store`."""
        bounds = (space.box_bytes, space.bytes, _bound(space.owner_bytes))
        full = await self._call(_CREATE, space, owner, box, None, head, secrets.token_hex(8), _microseconds(seconds), *bounds)
        self._check_room(space, full, 0)

    async def boxes(self, space: Space, owner: str) -> list[str]:
        """See :class:`Store`."""
        names = await self._ask(lambda: self._link.client.execute_command("HKEYS", f"{self._prefix}:{{{space.name}}}:of:{owner}"))
        return sorted(name.decode() for name in names)

    async def describe(self, space: Space, owner: str, box: str) -> Box:
        """See :class:`Store`."""
        head, epoch, version, size, value_bytes, entries = await self._call(_DESCRIBE, space, owner, box, None, space.entry_bytes)
        return Box(head, epoch.decode(), int(version), entries, int(size or 0), int(value_bytes or 0))

    async def delete(self, space: Space, owner: str, box: str) -> None:
        """See :class:`Store`."""
        await self._call(_DELETE, space, owner, box, None)

    async def put(
        self, space: Space, owner: str, entries: Sequence[tuple[str, bytes]], *, box: str = "", epoch: str | None = None
    ) -> Written:
        """See :class:`Store`."""
        added = changed = version = 0
        seconds = _microseconds(space.seconds) if epoch is None else -1
        bounds = (space.entry_bytes, space.bytes, _bound(space.owner_bytes), space.entries, int(space.evicts))
        for begin in range(0, len(entries), ENTRIES_AT_ONCE):
            given = [part for entry in entries[begin : begin + ENTRIES_AT_ONCE] for part in entry]
            try:
                answer = await self._call(_PUT, space, owner, box, epoch, seconds, *bounds, *given)
            except Full as error:
                error.stored = begin
                raise
            full, stored, more, other, version = map(int, answer)
            self._check_room(space, full, begin + stored)
            added, changed = added + more, changed + other
        return Written(added, changed, version)

    async def get(self, space: Space, owner: str, names: Sequence[str], *, box: str = "", most_bytes: int = READ_BYTES) -> Found:
        """See :class:`Store`."""
        values: list[bytes | None] = []
        size, epoch = 0, None
        while True:
            few = names[len(values) : len(values) + ENTRIES_AT_ONCE]
            head, found, read = await self._call(_GET, space, owner, box, epoch, min(READ_BYTES, most_bytes - size), *few)
            epoch = found.decode()
            values += read
            size += sum(map(len, filter(None, read)))
            if len(values) == len(names) or size > most_bytes:
                return Found(head, epoch, values)

    async def page(self, space: Space, owner: str, after: int, count: int, *, box: str = "", epoch: str | None = None) -> Page:
        """See :class:`Store`."""
        names, versions, values = await self._call(_PAGE, space, owner, box, epoch, READ_BYTES, after, count)
        more = len(names) == count or sum(map(len, values)) > READ_BYTES
        return Page(
            [(name.decode(), value) for name, value in zip(names, values, strict=True)], int(versions[-1]) if more else None
        )

    async def remove(self, space: Space, owner: str, names: Sequence[str], *, box: str = "") -> int:
        """See :class:`Store`."""
        removed = 0
        for begin in range(0, len(names), ENTRIES_AT_ONCE):
            few = names[begin : begin + ENTRIES_AT_ONCE]
            removed += await self._call(_REMOVE, space, owner, box, None, space.entry_bytes, *few)
        return removed

    def totals(self, space: str) -> Totals:
        """See :class:`Store`."""
        return self._totals.get(space, Totals(0, 0, 0))

    async def _call(self, script: Script, space: Space, owner: str, box: str, epoch: str | None, *arguments: Any) -> Any:
        """Run a script. Raises :class:`Missing`, :class:`Unavailable`, and :class:`Full` if Redis has no memory for what it would
        write."""
        prefix = f"{self._prefix}:{{{space.name}}}:"
        given = [prefix, owner, box, epoch or "", *arguments]
        *totals, answer = await self._ask(lambda: script(self._link.client, [f"{prefix}totals"], given))
        self._totals[space.name] = Totals(*map(int, totals))
        if answer is None:
            raise Missing
        return answer

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await self._link.ask(command, seconds=KEPT_SECONDS)
        except RedisFull:
            raise Full from None
        except RedisAway:
            raise Unavailable from None

    @staticmethod
    def _check_room(space: Space, full: int, stored: int) -> None:
        """Raise :class:`Full` if a script has reached a bound."""
        if full:
            raise Full(space.owner_bytes if full == 1 else space.bytes, owner=full == 1, stored=stored)

    async def _keep_writing(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(GATHER_SECONDS)
            while self._queue:
                await self._write()
            self._filled.clear()

    async def _write(self) -> None:
        """Write the first values of the queue. One script call takes a fifth of the gateway's CPU time of separate SETs; the keys
        of a script must be on one node, so a cluster gets SETs."""
        batch: list[tuple[bytes, bytes]] = []
        size = 0
        while self._queue and len(batch) < BATCH_VALUES and size < BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += len(batch[-1][1])
        self._queued_bytes -= size
        client, names = self._link.client, [self._cached_name(key) for key, _ in batch]
        try:
            if self._link.is_open:
                raise RedisAway
            if isinstance(client, RedisCluster):
                pipeline = client.pipeline()
                for name, (key, value) in zip(names, batch, strict=True):
                    spread = 1 + JITTER * (key[-1] / 127.5 - 1)
                    pipeline.execute_command("SET", name, value, "PX", max(1, int(self._cache_ms * spread)))
                await self._link.ask(pipeline.execute, seconds=WRITE_SECONDS)
            else:
                values = [value for _, value in batch]
                await self._link.ask(lambda: _CACHE(client, names, [*values, self._cache_ms, JITTER]), seconds=WRITE_SECONDS)
        except RedisAway:
            self._telemetry.cache_writes.labels("dropped").inc(len(names))
        else:
            self._telemetry.cache_writes.labels("stored").inc(len(names))

    def _cached_name(self, key: bytes) -> bytes:
        return f"{self._prefix}:score:".encode() + key


def _bound(most: int | None) -> int:
    return -1 if most is None else most


def _microseconds(seconds: float) -> int:
    return int(seconds * 1_000_000)
