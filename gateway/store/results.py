"""The cache of results in the store, and the use of it that a client allows with ``Cache-Control``.

Keys are digests that cover all inputs of a result (``gateway/scoring/scorer.py``: engine fingerprint, readout, tokens), so an entry
never changes and is never invalidated. Rows are stored as float32, the precision of the engines; softmax is applied after the
lookup.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from litestar.connection import ASGIConnection

from yardstick_llm.gateway.store.base import Store

Row = tuple[float, ...]
"""The numbers that a readout gives for one prompt (:data:`engine.wire.ScoreReadout`)."""


class ResultCache:
    """Finds and stores rows. No method raises: a store that fails finds nothing and stores nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get_many(self, keys: Sequence[bytes]) -> list[Row | None]:
        """Look up results."""
        return [_unpacked(value) for value in await self._store.cached(keys)]

    async def put_many(self, results: Mapping[bytes, Row]) -> None:
        """Store results as far as there is room."""
        # float32 in the machine's byte order, which the tokens in the key have too
        await self._store.cache({key: array("f", row).tobytes() for key, row in results.items()})


def _unpacked(value: bytes | None) -> Row | None:
    """Decode a value; None if its length is not valid."""
    return tuple(array("f", value)) if value and len(value) % 4 == 0 else None


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
