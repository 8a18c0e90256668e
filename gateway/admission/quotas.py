"""Charges requests to keys and reports the state of the limits to clients."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from litestar.connection import ASGIConnection

from gateway.context import RequestContext
from gateway.errors import RateLimited
from gateway.ids import new_id
from gateway.limits.base import CONCURRENCY, RATES, Cost, Lease, Limiter, Verdict, too_much, used
from gateway.metrics.telemetry import Telemetry
from gateway.tracing import stage

if TYPE_CHECKING:
    from gateway.keys import ApiKey


class Quotas:
    """The limits of keys, as an interface for routes."""

    def __init__(self, limiter: Limiter, telemetry: Telemetry) -> None:
        self._limiter = limiter
        self._telemetry = telemetry

    async def charge(self, connection: ASGIConnection, *, tokens: int, items: int = 0) -> Lease | None:  # type: ignore[type-arg]
        """Take one request with ``tokens``: those of its prompts plus the most that its answers may have.

        The lease is settled when the request ends (:func:`gateway.limits.base.used`). The caller records in it the messages to
        engines and the used tokens. Returns None if the key has no limits. Raises :class:`RateLimited`.
        """
        context = RequestContext.of(connection)
        key = context.key
        if key is None or not key.limits.any:
            return None
        cost = Cost(1, tokens, items)
        if context.reserved is not None:
            return await self._extend(context, key, context.reserved, cost)
        lease = Lease(key.id, new_id(), key.limits, cost)
        context.headers += _headers(await self._take(key, lease, cost, context))
        context.at_end.append(partial(self._end, context, lease))
        return lease

    async def reserve(self, connection: ASGIConnection, *, tokens: int, items: int) -> None:  # type: ignore[type-arg]
        """Take one request before images are fetched for it, with the least that it may cost. :meth:`charge` takes the rest, from
        the same lease. Raises :class:`RateLimited`."""
        context = RequestContext.of(connection)
        key = context.key
        if key is None or not key.limits.any:
            return
        lease = Lease(key.id, new_id(), key.limits, Cost(1, tokens, items), fetched=True)
        await self._take(key, lease, lease.cost, context)
        context.at_end.append(partial(self._end, context, lease))
        context.reserved = lease

    async def _extend(self, context: RequestContext, key: ApiKey, lease: Lease, cost: Cost) -> Lease:
        """Raise ``lease`` to ``cost``. Raises :class:`RateLimited`."""
        rest = Cost(*(max(0, whole - taken) for whole, taken in zip(cost, lease.cost, strict=True)))
        # what never fits is denied as a whole, because the rest alone may fit
        more = Lease(key.id, new_id(), lease.limits._replace(concurrency=None), cost if too_much(lease.limits, cost) else rest)
        context.headers += _headers(await self._take(key, more, cost, context))
        lease.cost = Cost(*(taken + left for taken, left in zip(lease.cost, rest, strict=True)))
        more.charged = more.cost  # it is settled as a part of the lease
        self._limiter.end(more)
        return lease

    async def _take(self, key: ApiKey, lease: Lease, cost: Cost, context: RequestContext) -> Verdict:
        """Take ``lease``, which is a part of ``cost``. Raises :class:`RateLimited`."""
        with stage("gateway.quota"):
            verdict = await self._limiter.take(lease)
        if verdict.denied is not None:
            context.headers += _headers(verdict)
            self._telemetry.limited(key.name, verdict.denied)
            raise RateLimited(_complaint(key, cost, verdict), retry_after=verdict.wait)
        return verdict

    def _end(self, context: RequestContext, lease: Lease) -> None:
        """Settle ``lease``, exactly once."""
        if lease.charged is None:
            lease.charged = used(lease, context.status)
            self._limiter.end(lease)


def _headers(verdict: Verdict) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's rate limit headers, with items as a third rate. Times look like ``6m0s`` and ``12ms``."""
    headers = []
    for name, level in zip(RATES, verdict.levels, strict=True):
        if level is not None:
            values = {"limit": str(level.limit), "remaining": str(level.remaining), "reset": duration(level.reset)}
            headers += [(f"x-ratelimit-{what}-{name}".encode(), value.encode()) for what, value in values.items()]
    return headers


def duration(seconds: float) -> str:
    """Format a duration like ``0s``, ``12ms``, ``1.5s`` or ``6m0s``, rounded up to milliseconds."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


def _complaint(key: ApiKey, cost: Cost, verdict: Verdict) -> str:
    if verdict.denied == CONCURRENCY:
        return f"The key {key.name!r} may have {key.limits.concurrency} requests in progress, and has them; wait for one to end."
    assert verdict.denied is not None
    place = RATES.index(verdict.denied)
    allowed = f"The key {key.name!r} may take {key.limits.rates[place]} {verdict.denied} a minute"
    if math.isinf(verdict.wait):
        return f"{allowed}, and this request needs {cost[place]}. Send a smaller request."
    return f"{allowed}, and less than this request's {cost[place]} are left. Try again in {duration(verdict.wait)}."
