"""What a client allows the cache to do, in HTTP's own words."""

from __future__ import annotations

from typing import NamedTuple

from litestar.connection import ASGIConnection


class CachePolicy(NamedTuple):
    """How one request uses caches."""

    read: bool = True
    """Take results from the result cache, and from other requests in flight."""
    write: bool = True
    """Leave results in the result cache, and the prompt in engines' prefix caches."""

    @classmethod
    def of(cls, connection: ASGIConnection) -> CachePolicy:  # type: ignore[type-arg]
        """The policy of a request. It may have several ``Cache-Control`` headers (RFC 9110, section 5.3)."""
        values = [value for name, value in connection.scope["headers"] if name == b"cache-control"]
        return cls.from_header(b",".join(values).decode("latin-1")) if values else DEFAULT

    @classmethod
    def from_header(cls, cache_control: str) -> CachePolicy:
        """``no-cache`` computes everything anew and keeps it; ``no-store`` keeps nothing either. Others change nothing."""
        directives = {part.strip().lower() for part in cache_control.split(",")}
        stores = "no-store" not in directives
        return cls(read=stores and "no-cache" not in directives, write=stores)


DEFAULT = CachePolicy()
