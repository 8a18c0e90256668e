"""Charges requests to keys and reports the state of the limits to clients."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from litestar.connection import ASGIConnection

from gateway.errors import ClientGone, GatewayError, Overloaded, RateLimited, RequestTimeout
from gateway.http.context import RequestContext
from gateway.ids import new_id
from gateway.limits.base import CONCURRENCY, RATES, Cost, Lease, Limiter, Verdict, too_much, used
from gateway.ops.metrics import Telemetry
from gateway.ops.tracing import stage

if TYPE_CHECKING:
    from gateway.keys import ApiKey


_FREE = (RequestTimeout.status, Overloaded.status, ClientGone.status)
"""Statuses of refusals that cost nothing."""


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
        return await self._charge(RequestContext.of(connection), Cost(1, tokens, items))

    async def reserve(
        self,
        connection: ASGIConnection,  # type: ignore[type-arg]
        *,
        tokens: int = 0,
        items: int = 0,
        fetches: bool = False,
    ) -> None:
        """Take one request before a text worker reads it, and before images are fetched for it, with the least that it may cost.
        :meth:`charge` takes the rest, from the same lease. Raises :class:`RateLimited`."""
        lease = await self.charge(connection, tokens=tokens, items=items)
        if lease is not None:
            lease.read = True
            lease.fetched |= fetches

    async def charge_refusal(self, context: RequestContext, error: GatewayError) -> None:
        """Take one request for a refusal, unless the request has taken it before. Overloads, requests that did not arrive and
        faults of the server cost nothing. Raises :class:`RateLimited`, which replaces ``error``."""
        if context.lease is None and 400 <= error.status < 500 and error.status not in _FREE:
            await self._charge(context, Cost(1, 0, 0))

    async def _charge(self, context: RequestContext, cost: Cost) -> Lease | None:
        """Take ``cost``, or what it has more than the request has taken before. Raises :class:`RateLimited`."""
        key = context.key
        if key is None or not key.limits.any:
            return None
        if context.lease is not None:
            return await self._extend(context, key, context.lease, cost)
        lease = Lease(key.id, new_id(), key.limits, cost)
        await self._take(key, lease, cost, context)
        context.at_end.append(partial(self._end, context, lease))
        context.lease = lease
        return lease

    async def _extend(self, context: RequestContext, key: ApiKey, lease: Lease, cost: Cost) -> Lease:
        """Raise ``lease`` to ``cost``. Raises :class:`RateLimited`."""
        rest = Cost(*(max(0, whole - taken) for whole, taken in zip(cost, lease.cost, strict=True)))
        if any(amount and limit is not None for amount, limit in zip(rest, lease.limits.rates, strict=True)):
            # what never fits is denied as a whole, because the rest alone may fit
            more = Lease(key.id, new_id(), lease.limits._replace(concurrency=None), cost if too_much(lease.limits, cost) else rest)
            await self._take(key, more, cost, context)
            more.charged = more.cost  # it is settled as a part of the lease
            self._limiter.end(more)
        lease.cost = Cost(*(taken + left for taken, left in zip(lease.cost, rest, strict=True)))
        return lease

    async def _take(self, key: ApiKey, lease: Lease, cost: Cost, context: RequestContext) -> None:
        """Take ``lease``, which is a part of ``cost``, and report the limits to the client. Raises :class:`RateLimited`."""
        with stage("gateway.quota"):
            verdict = await self._limiter.take(lease)
        earlier = [header for header in context.headers if not header[0].startswith(b"x-ratelimit-")]
        context.headers[:] = earlier + _headers(verdict)
        if verdict.denied is not None:
            self._telemetry.limited.labels(key.name, verdict.denied).inc()
            raise RateLimited(_complaint(key, cost, verdict), retry_after=verdict.wait)

    def _end(self, context: RequestContext, lease: Lease) -> None:
        """Settle ``lease``, exactly once."""
        if lease.charged is None:
            lease.charged = used(lease, context.status, overloaded=context.error == Overloaded.code)
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
