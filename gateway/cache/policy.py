"""Cache use that a client allows with ``Cache-Control``."""

from __future__ import annotations

from typing import NamedTuple

from litestar.connection import ASGIConnection


class CachePolicy(NamedTuple):
    """Whether one request reads and writes caches."""

    read: bool = True
    """Use results from the result cache and from other requests in flight."""
    write: bool = True
    """Store results in the result cache, and the prompt in engines' prefix caches."""

    @classmethod
    def of(cls, connection: ASGIConnection) -> CachePolicy:  # type: ignore[type-arg]
        """Return the policy of a request, which may have several ``Cache-Control`` headers (RFC 9110, section 5.3)."""
        values = [value for name, value in connection.scope["headers"] if name == b"cache-control"]
        return cls.from_header(b",".join(values).decode("latin-1")) if values else DEFAULT

    @classmethod
    def from_header(cls, cache_control: str) -> CachePolicy:
        """``no-cache`` computes and stores new results; ``no-store`` neither reads nor stores. Other directives have no effect."""
        directives = {part.strip().lower() for part in cache_control.split(",")}
        stores = "no-store" not in directives
        return cls(read=stores and "no-cache" not in directives, write=stores)


DEFAULT = CachePolicy()
