"""Limits of API keys: rates and concurrency, in memory or in Redis for all gateways.

Requests, tokens and items per minute follow the *generic cell rate algorithm* (ITU-T I.371; a leaky bucket stored as one time). A
limit of ``n`` per minute lets ``n`` through at once after a minute of rest, and then one more every ``60 / n`` s. The only state of
a rate is the time at which its allowance is whole again: a cost moves the time ahead, and a refund moves it back. Reasons for this
algorithm instead of windows:

- One number per limit is cheap to store and to change atomically, in Redis as here.
- The allowance returns continuously: there is no burst at the start of each minute, and the waiting time is exact.
- The remaining allowance and its reset time, which the headers report, follow from the same number.

In the worst minute, which begins after a rest, twice the limit passes; over longer times the average approaches the limit.

A request takes its expected cost when it begins, in two steps if a text worker reads it, and is settled once, when it ends:
:func:`used` computes the final charge, and the difference from the expected cost is given back, or taken if more was used. Over any
time since the start, the final charges sum to at most the limit times the minutes, plus one limit.

Concurrency is a set of leases, one for each request in progress. A lease ends with its request; the leases of a gateway that died
expire.

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
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.process.event_loop import end_tasks
from yardstick_llm.gateway.store.link import Link, RedisAway, Script

RATES = ("requests", "tokens", "items")
"""Names of the rates, in the order of every tuple in this module."""
CONCURRENCY = "concurrency"
MINUTE = 60.0
BUSY_SECONDS = 1.0
"""Retry-After if the concurrency limit is reached; the real wait is unknown."""


class Limits(NamedTuple):
    """Limits of one key; None is no limit."""

    rates: tuple[int | None, int | None, int | None] = (None, None, None)
    """Limits per minute, in the order of :data:`RATES`."""
    concurrency: int | None = None

    @property
    def any(self) -> bool:
        """Whether the key has any limit."""
        return self.concurrency is not None or self.rates != (None, None, None)


class Cost(NamedTuple):
    """Cost of one request in each rate."""

    requests: int
    tokens: int
    items: int


NOTHING = Cost(0, 0, 0)
CLIENT_GONE = 499
"""Status of a request whose client left before an answer began."""


class Level(NamedTuple):
    """Remaining allowance of one rate."""

    limit: int
    """Limit per minute."""
    remaining: int
    reset: float
    """Seconds until the whole allowance is available."""


class Verdict(NamedTuple):
    """Result of :meth:`Limiter.take`."""

    denied: str | None
    """The limit that denies the request: one of :data:`RATES` or :data:`CONCURRENCY`. Nothing is taken then. None if allowed."""
    wait: float
    """Seconds until the request fits; infinite if it never fits."""
    levels: tuple[Level | None, Level | None, Level | None]
    """State of each rate after this request."""


class Lease(msgspec.Struct, eq=False):
    """The share of the limits that one request takes; it is settled when the request ends."""

    owner: str
    """Id of the key."""
    id: str
    limits: Limits
    cost: Cost
    """Expected cost, taken when the request begins."""
    used_tokens: int | None = None
    """Tokens used by an answered request; None means the expected number."""
    begun: Cost = NOTHING
    """Cost of the messages that were sent to engines so far."""
    charged: Cost | None = None
    """Final cost; None until the request has ended."""
    read: bool = False
    """Whether it was taken before a text worker read the request."""
    fetched: bool = False
    """Whether images were fetched for the request."""
    shared: bool = False
    """Whether Redis granted the lease."""
    _messages: set[str] = msgspec.field(default_factory=set)
    """Ids of the messages in :attr:`begun`."""

    @property
    def more(self) -> Cost:
        """Final cost minus expected cost; negative numbers are refunds. Zero before the end."""
        if self.charged is None or self.charged is self.cost:
            return NOTHING
        return Cost(*(final - expected for final, expected in zip(self.charged, self.cost, strict=True)))

    def begin(self, message: str, *, tokens: int, items: int = 0) -> None:
        """Record a message that is sent to an engine. A message counts once, however often it is sent."""
        if message not in self._messages:
            self._messages.add(message)
            self.begun = Cost(1, self.begun.tokens + tokens, self.begun.items + items)


def used(lease: Lease, status: int, *, overloaded: bool = False) -> Cost:
    """Return the final charge of a request that ended with ``status``.

    ===========================  ==============================================================
    an answer or a stream began  the request; tokens as used, also where the stream broke later
    the client left before that  what had been sent to engines by then
    a refusal                    one request
    an overload, or a fault of   nothing
    the server
    ===========================  ==============================================================

    A request that images were fetched for counts as one request in any case, so a key cannot have images fetched without end; so
    does one that a text worker read and whose client left. ``overloaded``: the status 429 is not that of a limit of the key.
    """
    if status < 400:
        return lease.cost if lease.used_tokens is None else lease.cost._replace(tokens=lease.used_tokens)
    begun, counts = NOTHING, 400 <= status < 500 and not overloaded
    if status == CLIENT_GONE:
        begun, counts = lease.begun, lease.read
    return begun._replace(requests=1) if counts or lease.fetched else begun


class Limiter(Protocol):
    """Keeps the state of all limits. No method raises."""

    async def take(self, lease: Lease) -> Verdict:
        """Take the whole cost of the lease, or nothing."""

    def end(self, lease: Lease) -> None:
        """Release the lease's concurrency and settle ``lease.more``. Called once for each lease that was granted."""


def too_much(limits: Limits, cost: Cost) -> str | None:
    """Return the rate whose limit is smaller than ``cost``, so that no wait helps; None if there is none."""
    pairs = zip(RATES, limits.rates, cost, strict=True)
    return next((name for name, limit, amount in pairs if limit is not None and amount > limit), None)


def level(limit: int, ahead: float) -> Level:
    """Return the level of a rate whose allowance is whole in ``ahead`` seconds."""
    ahead = max(0.0, ahead)
    return Level(limit, max(0, math.floor((MINUTE - ahead) * limit / MINUTE + 1e-6)), ahead)


class LocalLimiter:
    """Keeps one time for each key and rate, and the number of leases of each key. Keys come from a file, so they are few."""

    def __init__(self) -> None:
        self._whole_at: dict[tuple[str, str], float] = {}  # by owner and rate: time of the whole allowance, monotonic clock
        self._held: Counter[str] = Counter()

    async def take(self, lease: Lease) -> Verdict:
        """Decide from this process's state."""
        now = time.monotonic()
        if name := too_much(lease.limits, lease.cost):
            return Verdict(name, float("inf"), self._levels(lease, now))
        denied, wait = self._shortage(lease, now)
        places = lease.limits.concurrency
        if denied is None and places is not None and self._held[lease.owner] >= places:
            denied, wait = CONCURRENCY, BUSY_SECONDS
        if denied is None:
            self.record(lease, now)
        return Verdict(denied, wait, self._levels(lease, now))

    def record(self, lease: Lease, now: float) -> None:
        """Take the cost of a lease that was granted here or by Redis."""
        self._charge(lease, lease.cost, now)
        self._held[lease.owner] += 1

    def end(self, lease: Lease) -> None:
        """Release the lease's concurrency and settle its cost."""
        self._held[lease.owner] -= 1
        if (more := lease.more) != NOTHING:
            self._charge(lease, more, time.monotonic())

    def _charge(self, lease: Lease, amounts: Cost, now: float) -> None:
        for name, limit, amount in zip(RATES, lease.limits.rates, amounts, strict=True):
            if limit is not None:
                begin = max(now, self._whole_at.get((lease.owner, name), now))
                self._whole_at[lease.owner, name] = begin + amount * MINUTE / limit

    def _shortage(self, lease: Lease, now: float) -> tuple[str | None, float]:
        """Return the rate with the longest wait, and the wait in seconds; None and 0 if no rate denies the request."""
        denied, longest = None, 0.0
        for name, limit, amount in zip(RATES, lease.limits.rates, lease.cost, strict=True):
            if limit is not None:
                ahead = max(0.0, self._whole_at.get((lease.owner, name), now) - now)
                wait = ahead + (amount - limit) * MINUTE / limit
                if wait > max(longest, 1e-6):
                    denied, longest = name, wait
        return denied, longest

    def _levels(self, lease: Lease, now: float) -> tuple[Level | None, Level | None, Level | None]:
        requests, tokens, items = (
            None if limit is None else level(limit, self._whole_at.get((lease.owner, name), now) - now)
            for name, limit in zip(RATES, lease.limits.rates, strict=True)
        )
        return requests, tokens, items


LEASE_SECONDS = 60.0
"""Expiry time of a lease, which frees the leases of a gateway that died. A running gateway renews its leases every third of it."""
SETTLE_SECONDS = 1.0
GATHER_SECONDS = 0.002
"""Time for which a settlement waits for others of the same key, to be sent in one call."""
LEASES_A_CALL = 1000
GIVEN_UP_SECONDS = 1.0
"""Time from the end of a request that Redis has not answered to its settlement, which must not overtake the command before it."""
RETRY_SECONDS = 0.25
"""Pause after a settlement that failed."""
MAX_SETTLEMENTS = 10_000
"""Most settlements waiting to be sent. Others are lost: their leases expire, and their requests are charged the expected cost."""

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
        self._ended: dict[Lease, float] = {}
        """Leases to settle in Redis, and when they expire there."""
        self._any_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the background tasks."""
        self._tasks = [asyncio.create_task(work()) for work in (self._keep_settling, self._keep_renewing)]

    async def stop(self) -> None:
        """Stop the background tasks and settle the leases that have ended."""
        await end_tasks(*self._tasks)
        await self._settle_all()

    async def take(self, lease: Lease) -> Verdict:
        """Decide in Redis, or in this process while Redis is away."""
        if too_much(lease.limits, lease.cost):
            return await self._local.take(lease)
        try:
            verdict = await self._ask(lease)
        except RedisAway:
            verdict = await self._local.take(lease)
            if verdict.denied is not None:
                self._give_up(lease)
        except asyncio.CancelledError:
            self._give_up(lease)
            raise
        else:
            if verdict.denied is None:
                lease.shared = True
                self._local.record(lease, time.monotonic())
        if verdict.denied is None and lease.limits.concurrency is not None:
            self._held[lease.id] = lease
        return verdict

    def end(self, lease: Lease) -> None:
        """Settle ``lease`` in this process now, and in Redis from the background."""
        self._local.end(lease)
        held = self._held.pop(lease.id, None) is not None
        if held or (lease.shared and lease.more != NOTHING):
            self._settle_later(lease)

    def _give_up(self, lease: Lease) -> None:
        """Free the place of a lease that Redis may have granted, or may grant when it reads the command."""
        if lease.limits.concurrency is not None:
            asyncio.get_running_loop().call_later(GIVEN_UP_SECONDS, self._settle_later, lease)

    def _settle_later(self, lease: Lease) -> None:
        """Settle ``lease`` in Redis from the background."""
        if len(self._ended) >= MAX_SETTLEMENTS:
            self._telemetry.settlements_lost.inc(1)
            return
        self._ended[lease] = time.monotonic() + self._lease_seconds
        self._any_ended.set()

    async def _ask(self, lease: Lease) -> Verdict:
        limits = lease.limits
        rates = [part for limit, cost in zip(limits.rates, lease.cost, strict=True) for part in (limit or 0, cost)]
        places = -1 if limits.concurrency is None else limits.concurrency
        arguments = [*rates, places, lease.id, int(self._lease_seconds * 1e6)]
        denied, wait, *ahead = await self._link.ask(lambda: _TAKE(self._link.client, self._names(lease), arguments))
        requests, tokens, items = (
            None if limit is None else level(limit, microseconds / 1e6)
            for limit, microseconds in zip(limits.rates, ahead, strict=True)
        )
        name = _DENIALS[denied]
        return Verdict(name, BUSY_SECONDS if name == CONCURRENCY else wait / 1e6, (requests, tokens, items))

    async def _keep_settling(self) -> None:
        while True:
            await self._any_ended.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._any_ended.clear()
            if await self._settle_all():
                await asyncio.sleep(RETRY_SECONDS)
                self._any_ended.set()

    async def _settle_all(self) -> bool:
        """Settle leases that have ended; return whether some are left to be settled again, until they have expired in Redis."""
        ended, self._ended = self._ended, {}
        left: dict[Lease, float] = {}
        for leases in _grouped(ended):
            for start in range(0, len(leases), LEASES_A_CALL):
                few = leases[start : start + LEASES_A_CALL]
                if not await self._settle(few):
                    now = time.monotonic()
                    held = (lease for lease in few if lease.limits.concurrency is not None)
                    left |= {lease: ended[lease] for lease in held if ended[lease] > now}
        self._ended |= left
        return bool(left)

    async def _settle(self, leases: Sequence[Lease]) -> bool:
        """Settle leases of one owner with equal limits; return whether Redis did. It may have executed a failed call: leases are
        removed again, because that can be repeated, and amounts are not sent again."""
        first, shared = leases[0], [lease for lease in leases if lease.shared]
        more = [sum(amounts) for amounts in zip(NOTHING, *(lease.more for lease in shared), strict=True)]
        rates = [part for limit, amount in zip(first.limits.rates, more, strict=True) for part in (limit or 0, amount)]
        arguments = [*rates, *(lease.id for lease in leases)]
        for lease in shared:
            lease.shared = False
        try:
            await self._link.ask(lambda: _SETTLE(self._link.client, self._names(first), arguments), seconds=SETTLE_SECONDS)
        except RedisAway:
            self._telemetry.settlements_lost.inc(len(shared))
            return False
        return True

    async def _keep_renewing(self) -> None:
        """Renew leases. One that is settled just before this is added again and expires by itself."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            for leases in _grouped(self._held.values()):
                arguments = [int(self._lease_seconds * 1e6), *(lease.id for lease in leases)]
                name = self._names(leases[0])[-1]
                with suppress(RedisAway):  # a later renewal adds the leases again
                    await self._link.ask(partial(_RENEW, self._link.client, [name], arguments), seconds=SETTLE_SECONDS)

    def _names(self, lease: Lease) -> list[str]:
        return [f"{self._prefix}:limit:{{{lease.owner}}}:{what}" for what in (*RATES, "leases")]


def _grouped(leases: Iterable[Lease]) -> list[list[Lease]]:
    """Group leases by owner and limits. The key file may change the limits, and amounts under different limits cannot be added."""
    groups: dict[tuple[str, Limits], list[Lease]] = {}
    for lease in leases:
        groups.setdefault((lease.owner, lease.limits), []).append(lease)
    return list(groups.values())
