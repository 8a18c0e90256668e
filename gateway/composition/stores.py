"""The stores of a gateway: in Redis, which all gateways share, or in its own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.adapters.store import LoadedStore, MemoryLoaded
from gateway.cache.base import ResultCache
from gateway.cache.memory import MemoryCache
from gateway.catalogues.store import CatalogueStore
from gateway.composition.parts import catalogues_in_memory
from gateway.composition.share import Share
from gateway.limits.base import Limiter
from gateway.limits.local import LocalLimiter
from gateway.metrics.telemetry import Telemetry
from gateway.responses.store import MemoryStore, ResponseStore
from gateway.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The limits of keys, cached results, stored responses, registered items and loaded adapters."""

    limiter: Limiter
    cache: ResultCache
    responses: ResponseStore
    catalogues: CatalogueStore
    adapters: LoadedStore
    share: Share | None
    """None: all is in memory."""

    @classmethod
    def opened(cls, settings: Settings, telemetry: Telemetry, cache: ResultCache | None) -> Self:
        """Create all in Redis if the settings name a server, otherwise in memory. ``cache``: to use instead of the cache of the
        settings."""
        if settings.redis_url is None:
            return cls(
                limiter=LocalLimiter(),
                cache=cache or MemoryCache(settings.cache_entries, settings.cache_bytes),
                responses=MemoryStore(settings.store_bounds),
                catalogues=catalogues_in_memory(settings, telemetry),
                adapters=MemoryLoaded(),
                share=None,
            )
        share = Share.opened(settings, telemetry)
        return cls(
            limiter=share.limiter,
            cache=cache or share.cache,
            responses=share.responses,
            catalogues=share.catalogues,
            adapters=share.adapters,
            share=share,
        )
