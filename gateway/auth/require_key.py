"""The middleware that requires an API key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.context import RequestContext
from gateway.edge.cycle import Incoming
from gateway.edge.middleware import HttpMiddleware
from gateway.errors import KeyExpired, Unauthorized

if TYPE_CHECKING:
    from gateway.auth.keyring import KeyRing
    from gateway.keys import ApiKey


MAX_HEADER_BYTES = 1024
"""Longest ``Authorization`` header that is accepted; a key of ``yardstick keys new`` gives a header of 53 bytes."""


class RequireKey(HttpMiddleware):
    """Refuses requests without a valid key, and stores the key in the request's context.

    A guard of the framework would need three times the CPU time.
    """

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def __deepcopy__(self, _: object) -> Self:
        """Return this object: the framework copies routers and their contents, but the keys must stay shared."""
        return self

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass a request with a valid key on. Raises :class:`Unauthorized`, :class:`gateway.errors.KeysUnavailable`."""
        RequestContext.in_scope(scope).key = key_of(self._ring, scope)
        await next_app(scope, receive, send)


def key_of(ring: KeyRing, scope: Scope) -> ApiKey:
    """Return the API key of a request. Raises :class:`Unauthorized`, :class:`gateway.errors.KeysUnavailable`."""
    given = Incoming.of(scope).headers.get(b"authorization", b"")
    if len(given) > MAX_HEADER_BYTES:
        raise Unauthorized(f"The `Authorization` header is longer than {MAX_HEADER_BYTES} bytes; no API key is that long.")
    scheme, _space, secret = given.decode("latin-1").partition(" ")
    key = ring.find(secret.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise Unauthorized("No valid API key was sent; send one as `Authorization: Bearer KEY`.")
    if key.expires is not None and key.expires_at <= time.time():
        raise KeyExpired(f"This API key expired on {key.expires.isoformat()}; ask for a new one.")
    return key
