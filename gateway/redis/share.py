"""All that gateways share, over one link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.cache.redis import RedisCache
from gateway.limits.shared import SharedLimiter
from gateway.redis.connect import open_client
from gateway.redis.link import Link
from gateway.settings import Settings
from gateway.telemetry import Telemetry


@dataclass(frozen=True)
class Share:
    """Results and limits in one Redis, behind one breaker."""

    link: Link
    cache: RedisCache
    limiter: SharedLimiter

    @classmethod
    def opened(cls, settings: Settings, telemetry: Telemetry) -> Self:
        """From ``settings``, with a Redis in them. Raises :class:`SettingsError`."""
        link = Link(open_client(settings), telemetry, seconds=settings.redis_seconds)
        cache = RedisCache(link, telemetry, prefix=settings.redis_prefix, ttl_seconds=settings.cache_ttl_seconds)
        return cls(link, cache, SharedLimiter(link, telemetry, prefix=settings.redis_prefix))

    def start(self) -> None:
        """Begin to work in the background."""
        self.link.start()
        self.cache.start()
        self.limiter.start()

    async def stop(self) -> None:
        """Send what is waiting, and hang up."""
        await self.cache.stop()
        await self.limiter.stop()
        await self.link.stop()
