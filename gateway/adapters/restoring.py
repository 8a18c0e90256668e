"""Brings engines up to date: loads remembered adapters that an engine lacks, and repeats unloads that failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress

from engine import wire
from gateway.adapters.calls import load_on, replicas_of, unload_on
from gateway.adapters.manager import AdapterManager
from gateway.adapters.store import Loaded, Unavailable
from gateway.ops.metrics import Telemetry
from gateway.pool.adapters import Reference
from gateway.pool.pool import Pool
from gateway.pool.replica import Replica

logger = logging.getLogger(__name__)

REREAD_SECONDS = 5.0
"""Interval between two readings of the store, which other gateways change too."""
FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
"""Pauses before an adapter is loaded on an engine again after a failure; they double from the first to the longest."""
AT_ONCE = 2
"""Most engines that this gateway brings up to date at a time."""


class Restorer:
    """A background task that compares engines with the store."""

    def __init__(
        self,
        pool: Pool,
        manager: AdapterManager,
        telemetry: Telemetry,
        *,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval``: seconds between two comparisons."""
        self._pool = pool
        self._manager = manager
        self._telemetry = telemetry
        self._interval = interval
        self._clock = clock
        self._read_at = float("-inf")
        self._pauses: dict[tuple[Replica, Loaded], tuple[float, float]] = {}
        """Length of the last pause, and the time until which an adapter is not loaded on a replica again."""
        self._running: dict[tuple[Replica, str], asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._missed = asyncio.Event()
        pool.adapters.awaited = self.awaits
        pool.adapters.missed = self._missed.set

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop the task and the calls that it has begun."""
        tasks = [task for task in (self._task, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def awaits(self, reference: Reference) -> bool:
        """Whether an adapter is remembered, so that an engine without it may have it soon."""
        return reference in self._manager.known and reference not in self._manager.busy

    async def _follow(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # a fault must not end the task
                logger.exception("adapters cannot be compared")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._missed.wait()
            self._missed.clear()

    async def look(self) -> None:
        """Compare once, and start what is to be done."""
        if self._clock() >= self._read_at + REREAD_SECONDS:
            await self._read()
        self._repeat_unloads()
        due = self._due()
        if due and await self._read():  # another gateway may have unloaded what is missing
            for replica, loaded in self._due():
                self._begin(replica, loaded.name, self._restore(replica, loaded))
        known = list(self._manager.known.values())
        self._pauses = {key: pause for key, pause in self._pauses.items() if not key[0].gone and key[1] in known}

    async def _read(self) -> bool:
        """Read the store; return whether it answered. What was read before stays valid while it does not."""
        try:
            self._manager.known = await self._manager.store.all()
        except Unavailable:
            return False
        self._read_at = self._clock()
        self._pool.adapters.settle()
        return True

    def _due(self) -> list[tuple[Replica, Loaded]]:
        """Return what engines lack, without what is in progress or pauses."""
        now = self._clock()
        return [
            (replica, loaded)
            for loaded in self._manager.known.values()
            if loaded.reference not in self._manager.busy
            for replica in replicas_of(self._pool, loaded.base)
            if replica.takes_work
            and replica.takes_adapters
            and _lacks(replica, loaded)
            and (replica, loaded.name) not in self._running
            and self._pauses.get((replica, loaded), (0.0, now))[1] <= now
        ]

    def _begin(self, replica: Replica, name: str, work: Coroutine[None, None, None]) -> None:
        if len(self._running) >= AT_ONCE:
            work.close()
            return
        task = self._running[replica, name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._running.pop((replica, name), None))

    async def _restore(self, replica: Replica, loaded: Loaded) -> None:
        """Load an adapter on an engine that lacks it."""
        outcome = await load_on([replica], wire.LoadAdapter(loaded.name, loaded.path, replace=True))
        self._telemetry.adapter_operated("restore", len(outcome.done), len(outcome.failed))
        pause = min(2 * self._pauses.get((replica, loaded), (FIRST_PAUSE_SECONDS / 2, 0.0))[0], LONGEST_PAUSE_SECONDS)
        if outcome.failed:
            logger.warning("engine %s: adapter %s is not loaded: %s", replica.client.url, loaded.reference, outcome.failed[0][1])
        elif outcome.adapter is not None and outcome.adapter.digest != loaded.digest:
            logger.warning("engine %s: the files of %s have changed since it was loaded", replica.client.url, loaded.reference)
            pause = LONGEST_PAUSE_SECONDS
        self._pauses[replica, loaded] = (pause, self._clock() + pause)
        if outcome.done and await self._read() and loaded.reference not in self._manager.known:  # it was unloaded meanwhile
            await unload_on([replica], loaded.name)
        await self._pool.adapters.refresh(replica)

    def _repeat_unloads(self) -> None:
        unloads = self._manager.unloads
        for replica in [replica for replica, names in unloads.items() if replica.gone or not names]:
            del unloads[replica]
        for replica, names in unloads.items():
            for name in sorted(names) if replica.takes_work else ():
                if (replica, name) not in self._running:
                    self._begin(replica, name, self._unload(replica, name))

    async def _unload(self, replica: Replica, name: str) -> None:
        outcome = await unload_on([replica], name)
        self._telemetry.adapter_operated("unload", len(outcome.done), len(outcome.failed))
        if not outcome.failed:
            self._manager.unloads.get(replica, set()).discard(name)
            await self._pool.adapters.refresh(replica)


def _lacks(replica: Replica, loaded: Loaded) -> bool:
    has = replica.adapters.get(loaded.name)
    return has is None or has.digest != loaded.digest
