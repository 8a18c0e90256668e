"""Interface between scoring and a cache of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Row = tuple[float, ...]
"""The numbers that a readout gives for one prompt (:data:`engine.wire.ScoreReadout`)."""


class ResultCache(Protocol):
    """Keys are digests (``gateway/scoring/keys.py``). A value never changes, so no entry is ever invalidated.

    No method raises: a cache that fails finds nothing and stores nothing.
    """

    async def get_many(self, keys: Sequence[bytes]) -> list[Row | None]:
        """Return the value of each key, None for a missing one."""
        ...

    async def put_many(self, results: Mapping[bytes, Row]) -> None:
        """Store ``results`` as far as there is room."""
        ...
