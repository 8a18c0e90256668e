"""Counters of the items in the engines' prefix caches, for the metrics and the console of a gateway."""

from __future__ import annotations

import asyncio
import logging

from engine import wire
from gateway.errors import GatewayError
from gateway.ops.collectors import ItemCacheSample, item_caches
from gateway.ops.metrics import Telemetry
from gateway.pool.pool import Pool
from gateway.pool.probe_times import SLOTS
from gateway.pool.replica import Replica

logger = logging.getLogger(__name__)
LOOK_SECONDS = 5.0
"""Interval between two requests for the statistics of an engine that answers at once."""


class ItemCaches:
    """A background task that asks engines for their statistics."""

    def __init__(self, pool: Pool, telemetry: Telemetry, *, interval: float = LOOK_SECONDS) -> None:
        """``interval``: seconds between two looks."""
        self._pool = pool
        self._interval = interval
        self._told: dict[Replica, wire.Stats] = {}
        self._task: asyncio.Task[None] | None = None
        telemetry.watch(lambda: item_caches(self.samples()))

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def samples(self) -> list[ItemCacheSample]:
        """Return what the present engines reported last. Engines that have reported nothing are missing."""
        return [
            ItemCacheSample(
                replica.client.url,
                stats.slots_items,
                stats.item_bytes,
                stats.slots_pinned,
                stats.scored_items,
                stats.cached_items,
                stats.evicted_item_tokens,
            )
            for replica in self._replicas
            if (stats := self._told.get(replica)) is not None
        ]

    @property
    def _replicas(self) -> list[Replica]:
        names = [model.name for model in self._pool.models]
        return [replica for name in names for version in self._pool.versions(name) for replica in version.replicas]

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._interval / 2)
            try:
                await self.look(self._interval / 2)
            except Exception:  # a fault must not end the task
                logger.exception("engines cannot be asked for their statistics")

    async def look(self, seconds: float = 0.0) -> None:
        """Ask each engine once, a few at a time within ``seconds``. One that does not answer keeps what it reported before."""
        replicas = self._replicas
        answers = await asyncio.gather(
            *(self._ask(replica, seconds * (place % SLOTS) / SLOTS) for place, replica in enumerate(replicas))
        )
        found = {replica: stats for replica, stats in zip(replicas, answers, strict=True) if stats is not None}
        self._told = {replica: self._told[replica] for replica in replicas if replica in self._told} | found

    @staticmethod
    async def _ask(replica: Replica, delay: float) -> wire.Stats | None:
        await asyncio.sleep(delay)
        if replica.state != "ready":
            return None
        try:
            return await replica.client.stats()
        except GatewayError:
            return None
