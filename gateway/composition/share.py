"""The cache and the limits that gateways share through Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.adapters.shared import RedisLoaded
from gateway.cache.redis import RedisCache
from gateway.catalogues.copies import Copies
from gateway.catalogues.shared import RedisCatalogues
from gateway.limits.shared import SharedLimiter
from gateway.metrics.telemetry import Telemetry
from gateway.redis.connect import open_client
from gateway.redis.link import Link
from gateway.responses.shared import RedisStore
from gateway.settings import Settings


@dataclass(frozen=True)
class Share:
    """The shared cache and limiter over one Redis link with one circuit breaker."""

    link: Link
    cache: RedisCache
    limiter: SharedLimiter
    responses: RedisStore
    catalogues: RedisCatalogues
    adapters: RedisLoaded

    @classmethod
    def opened(cls, settings: Settings, telemetry: Telemetry) -> Self:
        """Create both from ``settings``, which name a Redis server. Connects to nothing."""
        link = Link(open_client(settings), telemetry, seconds=settings.redis_seconds)
        cache = RedisCache(link, telemetry, prefix=settings.redis_prefix, ttl_seconds=settings.cache_ttl_seconds)
        responses = RedisStore(link, settings.store_bounds, prefix=settings.redis_prefix)
        copies = Copies(settings.catalogue_copies_bytes)
        catalogues = RedisCatalogues(link, settings.catalogue_bounds, copies, telemetry, prefix=settings.redis_prefix)
        limiter = SharedLimiter(link, telemetry, prefix=settings.redis_prefix)
        return cls(link, cache, limiter, responses, catalogues, RedisLoaded(link, prefix=settings.redis_prefix))

    def start(self) -> None:
        """Start the background tasks."""
        self.link.start()
        self.cache.start()
        self.limiter.start()

    async def stop(self) -> None:
        """Send queued writes, stop the background tasks and close the connections."""
        await self.cache.stop()
        await self.limiter.stop()
        await self.link.stop()
