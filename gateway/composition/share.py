"""The cache and the limits that gateways share through Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.adapters.store import RedisLoaded
from gateway.cache.redis import RedisCache
from gateway.catalogues.copies import Copies
from gateway.catalogues.shared import RedisCatalogues
from gateway.limits.shared import SharedLimiter
from gateway.metrics.telemetry import Telemetry
from gateway.redis.connect import open_client
from gateway.redis.link import Link
from gateway.responses.shared import RedisStore
from gateway.settings import Settings

STORE_SECONDS = 1.0
"""Time limit of a call of the stores, and of the probe that uses Redis for them again."""


@dataclass(frozen=True)
class Share:
    """The shared cache and limiter over one Redis link, and the stores over another, which waits longer for an answer: a pause of
    Redis that costs a request its cached results does not cost another its stored response."""

    link: Link
    store_link: Link
    cache: RedisCache
    limiter: SharedLimiter
    responses: RedisStore
    catalogues: RedisCatalogues
    adapters: RedisLoaded

    @classmethod
    def opened(cls, settings: Settings, telemetry: Telemetry) -> Self:
        """Create both from ``settings``, which name a Redis server. Connects to nothing."""
        link = Link(open_client(settings), telemetry, seconds=settings.redis_seconds)
        store_link = Link(open_client(settings), telemetry, seconds=STORE_SECONDS, use="stores")
        cache = RedisCache(link, telemetry, prefix=settings.redis_prefix, ttl_seconds=settings.cache_ttl_seconds)
        responses = RedisStore(store_link, settings.store_bounds, prefix=settings.redis_prefix)
        copies = Copies(settings.catalogue_copies_bytes)
        catalogues = RedisCatalogues(store_link, settings.catalogue_bounds, copies, telemetry, prefix=settings.redis_prefix)
        limiter = SharedLimiter(link, telemetry, prefix=settings.redis_prefix)
        adapters = RedisLoaded(store_link, prefix=settings.redis_prefix)
        return cls(link, store_link, cache, limiter, responses, catalogues, adapters)

    def start(self) -> None:
        """Start the background tasks."""
        self.link.start()
        self.store_link.start()
        self.cache.start()
        self.limiter.start()

    async def stop(self) -> None:
        """Send queued writes, stop the background tasks and close the connections."""
        await self.cache.stop()
        await self.limiter.stop()
        await self.link.stop()
        await self.store_link.stop()
