"""The parts of the gateway that run from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from litestar import Litestar

from gateway.adapters.restoring import Restorer
from gateway.auth.keyring import KeyRing
from gateway.composition.fleet import Fleet
from gateway.composition.stores import Stores
from gateway.metrics.telemetry import Telemetry
from gateway.process.watchdog import Watchdog
from gateway.workers.workers import Workers
from tracing.export import Exporter

START_SECONDS = 1.0
"""Time after the start from which the watchdog measures delays of the event loop."""


@dataclass(frozen=True, kw_only=True)
class Background:
    """Starts and stops these parts in order. What requests use stops after what sends requests."""

    watchdog: Watchdog
    workers: Workers
    fleet: Fleet
    restorer: Restorer
    keys: KeyRing | None
    stores: Stores
    exporter: Exporter | None
    telemetry: Telemetry

    @asynccontextmanager
    async def running(self, _: Litestar) -> AsyncIterator[None]:
        """Run the parts while the application does."""
        self._start()
        try:
            yield
        finally:
            await self._stop()

    def _start(self) -> None:
        self.watchdog.start(after=START_SECONDS)
        self.workers.start()
        self.fleet.pool.start()
        self.restorer.start()
        self.fleet.item_caches.start()
        if self.exporter:
            self.exporter.start()
        if self.keys:
            self.keys.start(self.telemetry)
        self.stores.start()

    async def _stop(self) -> None:
        if self.keys:
            self.keys.stop()
        await self.fleet.item_caches.stop()
        await self.restorer.stop()
        await self.fleet.pool.stop()
        await self.workers.stop()
        self.watchdog.stop()
        await self.stores.stop()
        await self.fleet.connections.close()
        if self.exporter:
            await asyncio.to_thread(self.exporter.close)
