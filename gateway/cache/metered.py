"""Metrics of a cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gateway.cache.base import ResultCache, Row
from gateway.ops.metrics import Telemetry
from gateway.ops.tracing import stage


class MeteredCache:
    """Wraps ``cache`` and counts its hits, misses and lookup times."""

    def __init__(self, cache: ResultCache, telemetry: Telemetry) -> None:
        self._cache = cache
        self._telemetry = telemetry

    async def get_many(self, keys: Sequence[bytes], model: str) -> list[Row | None]:
        """Look up ``keys`` of results of ``model``, and count hits, misses and the time."""
        began = time.perf_counter()
        with stage("gateway.cache") as lookup:
            results = await self._cache.get_many(keys)
            misses = results.count(None)
            if lookup is not None:
                lookup.attributes |= {"yardstick.cache.hits": len(results) - misses, "yardstick.cache.misses": misses}
        self._telemetry.looked_up(model, len(results) - misses, misses, time.perf_counter() - began)
        return results

    async def put_many(self, results: Mapping[bytes, Row]) -> None:
        """Store ``results``."""
        await self._cache.put_many(results)
