"""What a gateway keeps between requests: in Redis, which all gateways share, or in its own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.adapters.shared import RedisLoaded
from gateway.adapters.store import LoadedStore, MemoryLoaded
from gateway.catalogues.catalogues import Catalogues, catalogue_space
from gateway.limits.base import Limiter
from gateway.limits.local import LocalLimiter
from gateway.limits.shared import SharedLimiter
from gateway.metrics.telemetry import Telemetry
from gateway.responses.kept import Kept, response_space
from gateway.settings import Settings
from gateway.store.base import Store
from gateway.store.link import Link, open_client
from gateway.store.memory import MemoryStore
from gateway.store.redis import RedisStore


@dataclass(frozen=True, kw_only=True)
class Stores:
    """The limits of keys, the key-value store, and loaded adapters."""

    limiter: Limiter
    store: Store
    catalogues: Catalogues
    responses: Kept
    adapters: LoadedStore
    shared: tuple[Link, RedisStore, SharedLimiter] | None
    """What works in the background; None if all is in memory."""

    @classmethod
    def opened(cls, settings: Settings, telemetry: Telemetry) -> Self:
        """Create all in Redis if the settings name a server, otherwise in memory. Connects to nothing."""
        limiter: Limiter = LocalLimiter()
        store: Store = MemoryStore(settings.cache_entries, settings.cache_bytes)
        adapters: LoadedStore = MemoryLoaded()
        shared = None
        if settings.redis_url is not None:
            prefix = settings.redis_prefix
            link = Link(open_client(settings), telemetry, seconds=settings.redis_seconds)
            shared = (
                link,
                RedisStore(link, telemetry, prefix=prefix, cache_seconds=settings.cache_ttl_seconds),
                SharedLimiter(link, telemetry, prefix=prefix),
            )
            _, store, limiter = shared
            adapters = RedisLoaded(link, prefix=prefix)
        catalogues = Catalogues(store, catalogue_space(settings), telemetry)
        telemetry.catalogues.watch(lambda: store.totals(catalogues.space.name))
        return cls(
            limiter=limiter,
            store=store,
            catalogues=catalogues,
            responses=Kept(store, response_space(settings), telemetry, settings.stored_response_bytes),
            adapters=adapters,
            shared=shared,
        )

    def start(self) -> None:
        """Start the background tasks."""
        for part in self.shared or ():
            part.start()

    async def stop(self) -> None:
        """Send queued writes, stop the background tasks and close the connections."""
        for part in reversed(self.shared or ()):
            await part.stop()
