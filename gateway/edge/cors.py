"""Cross-origin requests of web pages: which origins may call, and what their scripts may read."""

from __future__ import annotations

from collections.abc import Sequence

from litestar.config.cors import CORSConfig
from litestar.types import HTTPScope

from gateway.edge.cycle import Incoming
from gateway.errors import Forbidden, GatewayError

_METHODS = ["GET", "POST", "OPTIONS"]
_LIMITS = [f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens", "items") for what in ("limit", "remaining", "reset")]
EXPOSED = ["x-request-id", "x-yardstick-cache", "x-yardstick-ignored", *_LIMITS, "retry-after", "retry-after-ms", "x-should-retry"]
"""Headers of answers that scripts of other origins may read, besides those that the Fetch standard always lets them read."""
_FORBIDDEN = "Web pages of this origin may not call this server. Add the origin to YARDSTICK_CORS_ORIGINS if the page is yours."


class Origins:
    """The origins whose pages may call."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def allow(self, origin: str) -> bool:
        """Whether pages of ``origin`` may call."""
        return origin in self._origins or "*" in self._origins

    def refusal(self, scope: HTTPScope) -> GatewayError | None:
        """Why a preflight request is refused; None for others. Requests themselves are answered: browsers keep the answers of
        other origins from their pages."""
        if scope["method"] != "OPTIONS" or not self._origins:
            return None
        origin = Incoming.of(scope).headers.get(b"origin")
        return None if origin is None or self.allow(origin.decode("latin-1")) else Forbidden(_FORBIDDEN)

    def config(self) -> CORSConfig | None:
        """The framework's configuration; None where no origin is allowed. Preflight requests need no key."""
        if not self._origins:
            return None
        return CORSConfig(allow_origins=sorted(self._origins), allow_methods=_METHODS, expose_headers=EXPOSED)  # type: ignore[arg-type]
