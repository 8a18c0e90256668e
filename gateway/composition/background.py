"""The parts of the gateway that run from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from litestar import Litestar

from gateway.adapters.manager import AdapterManager
from gateway.auth.keyring import KeyRing
from gateway.composition.fleet import Fleet
from gateway.composition.share import Share
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
    adapters: AdapterManager
    keys: KeyRing | None
    share: Share | None
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
        self.adapters.start()
        if self.exporter:
            self.exporter.start()
        if self.keys:
            self.keys.start(self.telemetry)
        if self.share:
            self.share.start()

    async def _stop(self) -> None:
        if self.keys:
            self.keys.stop()
        await self.adapters.stop()
        await self.fleet.pool.stop()
        await self.workers.stop()
        self.watchdog.stop()
        if self.share:
            await self.share.stop()
        if self.exporter:
            await asyncio.to_thread(self.exporter.close)
