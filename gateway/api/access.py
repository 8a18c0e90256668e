"""Who asks, for which model, and what the request is charged.

A key may be restricted to some models, and a model without engines may have a fallback. Tenant, weight, cache salt and priority
come from the key and the request.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import (
    ClientGone,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    RateLimited,
    RequestTimeout,
)
from yardstick_llm.gateway.http.context import AnyRequest, CachePolicy, RequestContext
from yardstick_llm.gateway.keys import PRIORITY_RANGE
from yardstick_llm.gateway.limits.limiter import CONCURRENCY, RATES, Cost, Lease, Limiter, Verdict, too_much, used
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import stage
from yardstick_llm.gateway.pool.adapters import AdapterModel
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.schemas.common import new_id

if TYPE_CHECKING:
    from yardstick_llm.gateway.keys import ApiKey

ANY_ADAPTER = ":*"
"""Ends an entry of a key's ``models`` that stands for all adapters of the model before it."""


def visible_models(request: AnyRequest, pool: Pool) -> dict[str, ServedModel]:
    """Return the models that the client may use, by each name that it may send, in alphabetical order."""
    models = {model.name: model for model in pool.models}
    aliases = {alias: models[real] for alias, real in pool.names.aliases.items() if real in models}
    named = {**pool.adapters.listed(), **models, **aliases}
    return {name: named[name] for name in sorted(named) if _may_use(request, pool, name)}


def requested_model(request: AnyRequest, pool: Pool, name: str | None, *, falls_back: bool = False) -> ServedModel:
    """Return the model called ``name``; None means the only model that the client may use. A model that the client may not use is
    reported as unknown. The model's name is recorded in the account of the request's context.

    With ``falls_back``, a model without a ready engine is replaced by its fallback, if that has one and the client may use it; a
    header of the response names the fallback. Raises :class:`ModelNotFound`, :class:`InvalidRequest`, :class:`NotReady`.
    """
    context = RequestContext.of(request)
    asked = _asked(request, pool, name)
    try:
        model = pool.model(asked)
    except (ModelNotFound, NotReady) as error:
        found = pool.fallback(asked, lambda name: _may_use(request, pool, name)) if falls_back and asked else None
        if found is None:
            raise _for_key(request, error, asked) from None
    else:
        ready = model.has_ready or not falls_back
        found = None if ready else pool.fallback(model.name, lambda name: _may_use(request, pool, name))
    if found is not None:
        context.headers.append((b"x-yardstick-fallback", quote(found.name).encode()))
        model = found
    context.account.model = model.base.name
    context.account.adapter = model.adapter.name if isinstance(model, AdapterModel) else None
    return model


def _asked(request: AnyRequest, pool: Pool, name: str | None) -> str | None:
    """Return the name to look up; None for the only model. Raises :class:`ModelNotFound`, :class:`InvalidRequest`."""
    allowed = _allowed(request)
    if allowed is None:
        return name
    if name is None and (len(allowed) > 1 or allowed[0].endswith(ANY_ADAPTER)):
        raise InvalidRequest(f"This key may use several models; set `model` to one of {_listed(allowed)}.", param="model")
    asked = allowed[0] if name is None else name
    if not _may_use(request, pool, asked):
        raise _unknown(asked, allowed)
    return asked


def _for_key(request: AnyRequest, error: GatewayError, asked: str | None) -> GatewayError:
    """Return ``error``, or one that does not name models that the key may not use."""
    allowed = _allowed(request)
    return error if allowed is None or asked is None or not isinstance(error, ModelNotFound) else _unknown(asked, allowed)


def _unknown(asked: str, allowed: list[str]) -> ModelNotFound:
    message = f"The model {asked[:200]!r} does not exist, or this key may not use it; the key is for {_listed(allowed)}."
    return ModelNotFound(message, param="model")


def _may_use(request: AnyRequest, pool: Pool, name: str) -> bool:
    """Whether the client may use the model called ``name``. A key for a model may use its aliases; a key for an alias may use the
    model by this name only."""
    allowed = _allowed(request)
    return allowed is None or name in allowed or pool.names.real(name) in allowed or _may_use_adapter(allowed, pool, name)


def _may_use_adapter(allowed: list[str], pool: Pool, name: str) -> bool:
    """Whether a key for ``allowed`` may use the adapter called ``name``. A key for a model may not use its adapters: it must list
    them, as ``adapter`` or ``base:adapter``, or all of them, as ``base:*``."""
    found = pool.adapters.reference(pool.names.real(name))
    if found is None:
        return False
    base, _, short = name.rpartition(":")
    if {str(found), found.base + ANY_ADAPTER} & set(allowed) or (base and short == found.name and base + ANY_ADAPTER in allowed):
        return True
    return found.name in allowed and pool.adapters.reference(found.name) == found


def _allowed(request: AnyRequest) -> list[str] | None:
    key = RequestContext.of(request).key
    return None if key is None else key.models


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def caller_of(request: AnyRequest, *, cache_salt: str | None = None) -> wire.Caller:
    """Return the caller for messages to engines. ``cache_salt`` is the client's own. ``Cache-Control: no-store`` keeps the prompt
    out of engines' prefix caches."""
    context = RequestContext.of(request)
    keeps = CachePolicy.of(request).write
    key = context.key
    if key is None:
        return wire.Caller(context.id.decode(), cache_salt=salt_of(b"", cache_salt), keep_prefix=keeps)
    salt = key.cache_salt if cache_salt is None else salt_of(key.cache_group, cache_salt)
    return wire.Caller(context.id.decode(), key.id, key.weight, salt, keeps)


def salt_of(group: bytes, cache_salt: str | None) -> str:
    """Return the namespace of ``cache_salt`` within a trust group, in hexadecimal. It is unique for each pair, so no choice of
    ``cache_salt`` reaches another group. It is empty for the shared group without a ``cache_salt``."""
    if cache_salt is None:
        return group.hex()
    # The key has a fixed length, and unsalted names are digests with another `person` (see ApiKey.cache_group).
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, key=group, person=b"yardstick-salt").hexdigest()


def priority_of(request: AnyRequest, priority: int | None) -> int:
    """Return the priority of a request that asks for ``priority``. The default is 0, or the number nearest to 0 in the key's range.

    Raises :class:`InvalidRequest` for a priority outside the range.
    """
    key = RequestContext.of(request).key
    least, most = PRIORITY_RANGE if key is None else (key.priority_min, key.priority_max)
    if priority is None:
        return min(max(0, least), most)
    if least <= priority <= most:
        return priority
    whose = "here" if key is None else "with this API key"
    raise InvalidRequest(f"`priority` is {priority}; {whose} it is {least} to {most}.", param="priority")


_FREE = (RequestTimeout.status, Overloaded.status, ClientGone.status)
"""Statuses of refusals that cost nothing."""


class Quotas:
    """The limits of keys, as an interface for routes."""

    def __init__(self, limiter: Limiter, telemetry: Telemetry) -> None:
        self._limiter = limiter
        self._telemetry = telemetry

    async def charge(self, request: AnyRequest, *, tokens: int, items: int = 0) -> Lease | None:
        """Take one request with ``tokens``: those of its prompts plus the most that its answers may have.

        The lease is settled when the request ends (:func:`gateway.limits.limiter.used`). The caller records in it the messages to
        engines and the used tokens. Returns None if the key has no limits. Raises :class:`RateLimited`.
        """
        return await self._charge(RequestContext.of(request), Cost(1, tokens, items))

    async def reserve(self, request: AnyRequest, *, tokens: int = 0, items: int = 0, fetches: bool = False) -> None:
        """Take one request before a text worker reads it, and before images are fetched for it, with the least that it may cost.
        :meth:`charge` takes the rest, from the same lease. Raises :class:`RateLimited`."""
        lease = await self.charge(request, tokens=tokens, items=items)
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
