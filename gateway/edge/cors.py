"""Cross-origin requests of web pages: which origins may call, and what their scripts may read."""

from __future__ import annotations

from collections.abc import Sequence

from litestar.config.cors import CORSConfig

_METHODS = ["GET", "POST", "OPTIONS"]
_LIMITS = [f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens", "items") for what in ("limit", "remaining", "reset")]
EXPOSED = ["x-request-id", "x-yardstick-cache", "x-yardstick-ignored", *_LIMITS, "retry-after", "retry-after-ms", "x-should-retry"]
"""Headers of answers that scripts of other origins may read, besides those that the Fetch standard always lets them read."""


class Origins:
    """The origins whose pages may call."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def allow(self, origin: str) -> bool:
        """Whether pages of ``origin`` may call."""
        return origin in self._origins or "*" in self._origins

    def config(self) -> CORSConfig | None:
        """The framework's configuration; None where no origin is allowed. Preflight requests need no key."""
        if not self._origins:
            return None
        return CORSConfig(allow_origins=sorted(self._origins), allow_methods=_METHODS, expose_headers=EXPOSED)  # type: ignore[arg-type]
