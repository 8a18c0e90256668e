"""CORS: the origins whose web pages may call the server, and the response headers that their scripts may read."""

from __future__ import annotations

from collections.abc import Sequence

from litestar.config.cors import CORSConfig
from litestar.types import HTTPScope

from gateway.edge.cycle import Incoming
from gateway.errors import Forbidden, GatewayError

_METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
_LIMITS = [f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens", "items") for what in ("limit", "remaining", "reset")]
EXPOSED = [
    "x-request-id",
    "x-yardstick-cache",
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
