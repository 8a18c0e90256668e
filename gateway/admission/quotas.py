"""Charges requests to keys and reports the state of the limits to clients."""

from __future__ import annotations

import math
from functools import partial

from litestar.connection import ASGIConnection

from gateway.context import RequestContext
from gateway.errors import RateLimited
from gateway.ids import new_id
from gateway.limits.base import CONCURRENCY, RATES, Cost, Lease, Limiter, Verdict, used
from gateway.metrics.telemetry import Telemetry
from gateway.tracing import stage


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
        lease = Lease(key.id, new_id(), key.limits, Cost(1, tokens, items))
        with stage("gateway.quota"):
            verdict = await self._limiter.take(lease)
        context.headers += _headers(verdict)
        if verdict.denied is not None:
            self._telemetry.limited(key.name, verdict.denied)
            raise RateLimited(_complaint(key.name, lease, verdict), retry_after=verdict.wait)
        context.at_end.append(partial(self._end, context, lease))
        return lease

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


def _complaint(name: str, lease: Lease, verdict: Verdict) -> str:
    if verdict.denied == CONCURRENCY:
        return f"The key {name!r} may have {lease.limits.concurrency} requests in progress, and has them; wait for one to end."
    assert verdict.denied is not None
    place = RATES.index(verdict.denied)
    limit, cost = lease.limits.rates[place], lease.cost[place]
    allowed = f"The key {name!r} may take {limit} {verdict.denied} a minute"
    if math.isinf(verdict.wait):
        return f"{allowed}, and this request needs {cost}. Send a smaller request."
    return f"{allowed}, and less than this request's {cost} are left. Try again in {duration(verdict.wait)}."
