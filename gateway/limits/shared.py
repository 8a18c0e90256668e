"""Limits kept in Redis and shared by all gateways: one script call in one round trip decides, on the clock of Redis.

The entries of the key with id ``ID`` (all in one slot of a cluster):

=================================  ================================================================================
``PREFIX:limit:{ID}:requests``     the time at which the allowance is whole, and the time at which this was written, in
                                   microseconds since 1970; likewise ``tokens`` and ``items``
``PREFIX:limit:{ID}:leases``       sorted set: lease ids, scored by expiry time
=================================  ================================================================================

Each gateway also records locally what its own requests took. While Redis is away, each gateway decides from that record and allows
each key its whole limit; N gateways together then allow N times the limit.

A clock of Redis that is set back changes no allowance: times that were written later than now are moved back by the difference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from gateway.limits.base import BUSY_SECONDS, CONCURRENCY, NOTHING, RATES, Lease, Level, Limits, Verdict, level, too_much
from gateway.limits.local import LocalLimiter
from gateway.ops.metrics import Telemetry
from gateway.redis.link import Link, RedisAway
from gateway.redis.scripts import Script

LEASE_SECONDS = 60.0
"""Expiry time of a lease, which frees the leases of a gateway that died. A running gateway renews its leases every third of it."""
SETTLE_SECONDS = 1.0
GATHER_SECONDS = 0.002
"""Time for which a settlement waits for others of the same key, to be sent in one call."""
LEASES_A_CALL = 1000
GIVEN_UP_SECONDS = 1.0
"""Time from the end of a request that Redis has not answered to its settlement, which must not overtake the command before it."""
MAX_SETTLEMENTS = 10_000
"""Most settlements waiting to be sent. Others are lost: their leases expire, and their requests are charged the expected cost."""
REMOVE_SECONDS = 0.25
"""Pause between two attempts to remove leases that a failed call may have left in Redis."""

_DENIALS = (None, *RATES, CONCURRENCY)

# set(key, whole) writes the time at which an allowance is whole. get(key, found) returns it from the entry of the key; now if there
# is none. An entry that was written later than now is written again, so that its time passes from now on.
_TIMES = """
    local time = redis.call('TIME')
    local now = time[1] * 1000000 + time[2]
    local function set(key, whole)
        redis.call('SET', key, string.format('%.0f %.0f', whole, now), 'PX', math.ceil((whole - now) / 1000) + 1000)
    end
    local function get(key, found)
        local whole, written = string.match(found or '', '^(%d+) (%d+)$')
        if not whole then
            return now
        end
        local back = tonumber(written) - now
        if back > 0 then
            whole = whole - back
            if whole > now then
                set(key, whole)
            end
        end
        return math.max(now, tonumber(whole))
    end
    """

# KEYS: requests, tokens, items, leases. ARGV: a limit and a cost for each rate (limit 0: none), concurrency (-1: none), lease id,
# lease time. Returns the denial (0: none, else an index in _DENIALS), the wait, and for each rate the time until its allowance is
# whole; times in microseconds.
_TAKE = Script(
    _TIMES
    + """
    local MINUTE = 60000000
    local found = redis.call('MGET', KEYS[1], KEYS[2], KEYS[3])
    local denied, wait, whole, ahead = 0, 0, {}, {}
    for i = 1, 3 do
        local limit, cost = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
        ahead[i] = 0
        if limit > 0 then
            local begin = get(KEYS[i], found[i])
            ahead[i] = begin - now
            whole[i] = begin + cost * MINUTE / limit
            local short = whole[i] - now - MINUTE
            if short > 1 and short > wait then
                denied, wait = i, short
            end
        end
    end
    local places = tonumber(ARGV[7])
    if denied == 0 and places >= 0 then
        redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now)
        redis.call('ZREMRANGEBYSCORE', KEYS[4], now + 2 * ARGV[9], '+inf')
        if redis.call('ZCARD', KEYS[4]) >= places then
            denied = 4
        else
            redis.call('ZADD', KEYS[4], now + ARGV[9], ARGV[8])
            redis.call('PEXPIRE', KEYS[4], math.ceil(ARGV[9] / 1000))
        end
    end
    if denied == 0 then
        for i, time in pairs(whole) do
            set(KEYS[i], time)
            ahead[i] = time - now
        end
    end
    return {denied, math.ceil(wait), math.ceil(ahead[1]), math.ceil(ahead[2]), math.ceil(ahead[3])}
    """
)

# KEYS: requests, tokens, items, leases. ARGV: a limit (0: none) and the difference from the expected cost for each rate; lease ids.
_SETTLE = Script(
    _TIMES
    + """
    redis.call('ZREM', KEYS[4], unpack(ARGV, 7))
    for i = 1, 3 do
        local limit, more = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
        if limit > 0 and more ~= 0 then
            local whole = get(KEYS[i], redis.call('GET', KEYS[i])) + more * 60000000 / limit
            if whole > now then
                set(KEYS[i], whole)
            else
                redis.call('DEL', KEYS[i])
            end
        end
    end
    """
)

# KEYS: leases. ARGV: lease time, lease ids. Adds leases again that Redis has lost or never had.
_RENEW = Script(
    """
    local time = redis.call('TIME')
    local till = time[1] * 1000000 + time[2] + ARGV[1]
    for i = 2, #ARGV do
        redis.call('ZADD', KEYS[1], till, ARGV[i])
    end
    redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[1] / 1000))
    """
)


class SharedLimiter:
    """A :class:`Limiter` in Redis. Between :meth:`start` and :meth:`stop` leases are renewed and settled in the background."""

    def __init__(self, link: Link, telemetry: Telemetry, *, prefix: str, lease_seconds: float = LEASE_SECONDS) -> None:
        self._link = link
        self._telemetry = telemetry
        self._prefix = prefix
        self._lease_seconds = lease_seconds
        self._local = LocalLimiter()
        self._held: dict[str, Lease] = {}  # leases of keys with a concurrency limit, by lease id
        self._ended: list[Lease] = []
        self._any_ended = asyncio.Event()
        self._left: dict[Lease, float] = {}
        """Leases that may still be in Redis, and when they expire there."""
        self._any_left = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the background tasks."""
        self._tasks = [asyncio.create_task(work()) for work in (self._keep_settling, self._keep_renewing, self._keep_removing)]

    async def stop(self) -> None:
        """Stop the background tasks and settle the leases that have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._settle_all()

    async def take(self, lease: Lease) -> Verdict:
        """Decide in Redis, or in this process while Redis is away."""
        if too_much(lease.limits, lease.cost):
            return await self._local.take(lease)
        try:
            verdict = await self._ask(lease)
        except RedisAway:
            verdict = await self._local.take(lease)
            if verdict.denied is not None:  # Redis may have granted the lease all the same
                self._remove_later([lease])
        except asyncio.CancelledError:  # Redis may have granted the lease, or grant it when it reads the command
            if lease.limits.concurrency is not None:
                asyncio.get_running_loop().call_later(GIVEN_UP_SECONDS, self._settle_later, lease)
            raise
        else:
            if verdict.denied is None:
                lease.shared = True
                self._local.record(lease)
        if verdict.denied is None and lease.limits.concurrency is not None:
            self._held[lease.id] = lease
        return verdict

    def end(self, lease: Lease) -> None:
        """Settle ``lease`` in this process now, and in Redis from the background."""
        self._local.end(lease)
        held = self._held.pop(lease.id, None) is not None
        if held or (lease.shared and lease.more != NOTHING):
            self._settle_later(lease)

    def _settle_later(self, lease: Lease) -> None:
        """Settle ``lease`` in Redis from the background."""
        if len(self._ended) >= MAX_SETTLEMENTS:
            self._telemetry.settlements_lost.inc(1)
            return
        self._ended.append(lease)
        self._any_ended.set()

    async def _ask(self, lease: Lease) -> Verdict:
        limits = lease.limits
        rates = [part for limit, cost in zip(limits.rates, lease.cost, strict=True) for part in (limit or 0, cost)]
        places = -1 if limits.concurrency is None else limits.concurrency
        arguments = [*rates, places, lease.id, int(self._lease_seconds * 1e6)]
        keys = [*(self._name(lease, rate) for rate in RATES), self._name(lease, "leases")]
        denied, wait, *ahead = await self._link.ask(lambda: _TAKE(self._link.client, keys, arguments))
        requests, tokens, items = map(_level, limits.rates, ahead)
        name = _DENIALS[denied]
        return Verdict(name, BUSY_SECONDS if name == CONCURRENCY else wait / 1e6, (requests, tokens, items))

    async def _keep_settling(self) -> None:
        while True:
            await self._any_ended.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._any_ended.clear()
            await self._settle_all()

    async def _settle_all(self) -> None:
        ended, self._ended = self._ended, []
        for leases in _grouped(ended):
            for start in range(0, len(leases), LEASES_A_CALL):
                await self._settle(leases[start : start + LEASES_A_CALL])

    async def _settle(self, leases: Sequence[Lease]) -> None:
        """Settle leases of one owner with equal limits. Redis may have executed a failed call: leases are removed again, because
        that can be repeated, and amounts are not sent again."""
        first = leases[0]
        keys = [*(self._name(first, rate) for rate in RATES), self._name(first, "leases")]
        more = [sum(amounts) for amounts in zip(NOTHING, *(lease.more for lease in leases if lease.shared), strict=True)]
        rates = [part for limit, amount in zip(first.limits.rates, more, strict=True) for part in (limit or 0, amount)]
        arguments = [*rates, *(lease.id for lease in leases)]
        try:
            await self._link.ask(lambda: _SETTLE(self._link.client, keys, arguments), seconds=SETTLE_SECONDS)
        except RedisAway:
            self._telemetry.settlements_lost.inc(len(leases))
            self._remove_later(leases)

    def _remove_later(self, leases: Iterable[Lease]) -> None:
        """Remove leases from Redis in the background, until this succeeds or they have expired there."""
        expires = time.monotonic() + self._lease_seconds
        if len(self._left) < MAX_SETTLEMENTS:
            self._left.update((lease, expires) for lease in leases if lease.limits.concurrency is not None)
            self._any_left.set()

    async def _keep_removing(self) -> None:
        while True:
            await self._any_left.wait()
            await asyncio.sleep(REMOVE_SECONDS)
            now = time.monotonic()
            self._left = {lease: expires for lease, expires in self._left.items() if expires > now}
            for leases in _grouped(self._left):
                for start in range(0, len(leases), LEASES_A_CALL):
                    await self._remove(leases[start : start + LEASES_A_CALL])
            if not self._left:
                self._any_left.clear()

    async def _remove(self, leases: Sequence[Lease]) -> None:
        """Remove leases of one owner."""
        name, ids = self._name(leases[0], "leases"), [lease.id for lease in leases]
        with suppress(RedisAway):
            await self._link.ask(lambda: self._link.client.zrem(name, *ids), seconds=SETTLE_SECONDS)
            for lease in leases:
                self._left.pop(lease, None)

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            for leases in _grouped(self._held.values()):
                await self._renew(leases)

    async def _renew(self, leases: Sequence[Lease]) -> None:
        """Renew leases of one owner. A lease that is settled just before this call is added again and expires by itself."""
        arguments = [int(self._lease_seconds * 1e6), *(lease.id for lease in leases)]
        name = self._name(leases[0], "leases")
        with suppress(RedisAway):  # a later renewal adds the leases again
            await self._link.ask(lambda: _RENEW(self._link.client, [name], arguments), seconds=SETTLE_SECONDS)

    def _name(self, lease: Lease, what: str) -> str:
        return f"{self._prefix}:limit:{{{lease.owner}}}:{what}"


def _grouped(leases: Iterable[Lease]) -> list[list[Lease]]:
    """Group leases by owner and limits. The key file may change the limits, and amounts under different limits cannot be added."""
    groups: dict[tuple[str, Limits], list[Lease]] = {}
    for lease in leases:
        groups.setdefault((lease.owner, lease.limits), []).append(lease)
    return list(groups.values())


def _level(limit: int | None, ahead: int) -> Level | None:
    return None if limit is None else level(limit, ahead / 1e6)
