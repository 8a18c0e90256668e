"""Web pages that may call the server: CORS, and the protection of servers without keys.

A server without keys listens on loopback only, but a web page that the user visits can reach it in two ways: through a host name
that its owner points to 127.0.0.1 (DNS rebinding; the ``Host`` header reveals it), or with requests whose responses the page cannot
read (CSRF; ``Origin`` and ``Sec-Fetch-Site`` reveal it). On a server with keys, a page would need a key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from functools import lru_cache

from litestar.config.cors import CORSConfig
from litestar.types import HTTPScope

from yardstick_llm.gateway.errors import Forbidden, GatewayError, Misdirected, UnsupportedMediaType
from yardstick_llm.gateway.http.connection import Incoming
from yardstick_llm.gateway.ops.metrics import Telemetry

_METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
_LIMITS = [f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens", "items") for what in ("limit", "remaining", "reset")]
EXPOSED = [
    "x-request-id",
    "x-yardstick-cache",
    "x-yardstick-expected-tokens",
    "x-yardstick-truncated",
    "x-yardstick-ignored",
    "x-yardstick-fallback",
    "x-yardstick-preset-fallback",
    *_LIMITS,
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
]
"""Response headers that scripts of other origins may read, besides those that the Fetch standard always allows."""
_FORBIDDEN = "Web pages of this origin may not call this server. Add the origin to YARDSTICK_CORS_ORIGINS if the page is yours."


class Origins:
    """The allowed origins."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def allow(self, origin: str) -> bool:
        """Whether pages of ``origin`` may call."""
        return origin in self._origins or "*" in self._origins

    def refusal(self, scope: HTTPScope) -> GatewayError | None:
        """Return the error for a preflight request of an origin that is not allowed; None for other requests. Other requests are
        answered, because browsers keep the answers from pages of other origins."""
        if scope["method"] != "OPTIONS" or not self._origins:
            return None
        origin = Incoming.of(scope).headers.get(b"origin")
        return None if origin is None or self.allow(origin.decode("latin-1")) else Forbidden(_FORBIDDEN)

    def config(self) -> CORSConfig | None:
        """Return the framework's configuration; None if no origin is allowed. Preflight requests need no key."""
        if not self._origins:
            return None
        return CORSConfig(allow_origins=sorted(self._origins), allow_methods=_METHODS, expose_headers=EXPOSED)  # type: ignore[arg-type]


class LocalGuard:
    """Checks requests to a server without keys."""

    def __init__(self, allowed_hosts: Sequence[str], origins: Origins, telemetry: Telemetry) -> None:
        self._names = {"localhost", *(name.lower() for name in allowed_hosts)}
        self._origins = origins
        self._telemetry = telemetry
        self._is_allowed_host = lru_cache(256)(self._check_host)

    def refusal(self, scope: HTTPScope) -> GatewayError | None:
        """Return the error for a request that is refused; None if it is allowed."""
        headers = Incoming.of(scope).headers
        host = headers.get(b"host", b"")
        if host and not self._is_allowed_host(host):
            return self._count("host", Misdirected(_HOST))
        if (b"origin" in headers or b"sec-fetch-site" in headers) and not self._is_allowed_page(scope["method"], headers):
            return self._count("origin", Forbidden(_ORIGIN))
        kind = headers.get(b"content-type")
        if kind and scope["method"] == "POST" and not _is_json(kind):
            return self._count("content_type", UnsupportedMediaType(_KIND))
        return None

    def _count(self, reason: str, error: GatewayError) -> GatewayError:
        self._telemetry.rejected.labels(reason).inc()
        return error

    def _check_host(self, header: bytes) -> bool:
        """Whether ``header``, with or without a port, names this machine or an allowed host."""
        text = header.decode("latin-1").lower()
        name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
        if name in self._names:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def _is_allowed_page(self, method: str, headers: Mapping[bytes, bytes]) -> bool:
        origin = headers.get(b"origin")
        if origin is not None:
            same = origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()
            return same or self._origins.allow(origin.decode("latin-1"))
        follows_a_link = method in ("GET", "HEAD") and headers.get(b"sec-fetch-mode") == b"navigate"
        return follows_a_link or headers[b"sec-fetch-site"] in (b"same-origin", b"none")


@lru_cache(256)
def _is_json(kind: bytes) -> bool:
    essence = kind.partition(b";")[0].strip().lower()
    return essence == b"application/json" or (essence.startswith(b"application/") and essence.endswith(b"+json"))


_HOST = (
    "The Host header names neither this machine nor an allowed host. Use http://127.0.0.1 or http://localhost, or add the name to "
    "YARDSTICK_ALLOWED_HOSTS."
)
_ORIGIN = (
    "A web page of another origin sent this request, and this server has no keys. Add the origin to YARDSTICK_CORS_ORIGINS if the "
    "page is yours."
)
_KIND = "The Content-Type must be application/json; with curl, add -H 'Content-Type: application/json'."
