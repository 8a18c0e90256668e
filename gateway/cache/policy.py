"""What a client allows the cache to do, in HTTP's own words."""

from __future__ import annotations

from typing import NamedTuple


class CachePolicy(NamedTuple):
    """How one request uses the cache."""

    read: bool = True
    """Take results from the cache, and from other requests in flight."""
    write: bool = True
    """Leave results in the cache."""

    @classmethod
    def from_header(cls, cache_control: str | None) -> CachePolicy:
        """``no-cache`` computes everything anew and keeps it; ``no-store`` leaves no trace either. Others change nothing."""
        if not cache_control:
            return cls()
        directives = {part.strip().lower() for part in cache_control.split(",")}
        stores = "no-store" not in directives
        return cls(read=stores and "no-cache" not in directives, write=stores)
