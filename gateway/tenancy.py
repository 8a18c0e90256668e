"""Who a request belongs to, as engines and caches see it."""

from __future__ import annotations

from litestar.connection import ASGIConnection

from engine import wire
from gateway.exchange import Exchange


def caller_of(
    connection: ASGIConnection,  # type: ignore[type-arg]
    *,
    cache_salt: str | None = None,
    stores: bool = True,
) -> wire.Caller:
    """The caller named in messages to engines. ``cache_salt`` is the client's own; ``stores`` False: leave nothing in a cache."""
    exchange = Exchange.of(connection)
    tenant = "" if exchange.key is None else exchange.key.id
    return wire.Caller(exchange.id.decode(), tenant, cache_salt=cache_salt or "", keep_prefix=stores)
