"""Moves the items of an engine that leaves: computes them on the engines that they are placed on next, before they are asked for.

The gateway remembers the items that it has sent to each engine lately (:class:`RecentItems`), so it needs no answer of an engine
that is about to end, and every gateway moves what its own clients use. An engine computes an item once, also if several gateways
send it.

A handover gives way to all other work. It has the last priority and the least weight in the engines' queues, sends one small part
at a time, waits while the engines have requests of this gateway to compute, and waits longer if a part had to queue for requests of
other gateways. While no other engine is ready it waits too: the replacement may be a second late. It ends when all items have
moved, when its time is over, when the engine is gone, or when it takes requests again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from engine import wire
from gateway.errors import GatewayError
from gateway.keys import PRIORITY_RANGE
from gateway.metrics.telemetry import Telemetry
from gateway.pool.fanout import FanOut
from gateway.pool.prompts import Prompts, any_readout
from gateway.pool.recent_items import RecentItem
from gateway.pool.replica import Replica, ServedModel

logger = logging.getLogger(__name__)

PART_TOKENS = 8192
"""Tokens that are sent at a time, to all engines together: about one step of an engine."""
BUSY_TOKENS = 8192
"""Tokens in flight from this gateway above which an engine counts as busy."""
QUEUED_SECONDS = 0.05
"""Time in an engine's queue above which the engine counts as busy with requests of other gateways."""
PAUSE_SECONDS = 0.02
MAX_PAUSE_SECONDS = 2.0
"""First and longest pause while engines are busy."""
TENANT, WEIGHT = "handover", 0.001
"""Flow of handovers in the engines' queues, and its share: the least that there is."""
_QUERY = [0]
"""Stands for the query; any token."""


class Handover:
    """Moves the items of engines that leave."""

    def __init__(
        self, fan_out: FanOut, telemetry: Telemetry, *, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``seconds``: longest time of one handover."""
        self._fan_out = fan_out
        self._telemetry = telemetry
        self._seconds = seconds
        self._clock = clock
        self._running: dict[Replica, asyncio.Task[None]] = {}

    def begin(self, model: ServedModel, leaving: Replica) -> None:
        """Move the items of ``leaving`` in the background. Repeating it does nothing until there are other items."""
        if len(leaving.items) and leaving not in self._running:
            task = self._running[leaving] = asyncio.create_task(self._run(model, leaving))
            task.add_done_callback(lambda _: self._running.pop(leaving))

    async def stop(self) -> None:
        """End all handovers."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, model: ServedModel, leaving: Replica) -> None:
        moved, items = 0, list[RecentItem]()
        try:
            async with asyncio.timeout(self._seconds):
                if await self._has_turn(model, leaving):
                    items = leaving.items.take()
                for part in parts_of(items, self._clock()):
                    if not await self._has_turn(model, leaving):
                        break
                    moved += await self._send(model, part)
        except TimeoutError:
            pass
        finally:
            if not (items or leaving.takes_work):  # no other engine was there in time
                items = leaving.items.take()
            self._telemetry.catalogues.items_left(len(items) - moved)
            logger.info("engine %s: %d of %d items moved to other engines", leaving.client.url, moved, len(items))

    async def _has_turn(self, model: ServedModel, leaving: Replica) -> bool:
        """Wait until other engines are ready and none is busy; return whether the handover should go on."""
        while not (leaving.gone or leaving.silent or leaving.takes_work):
            usable = model.usable
            if usable and all(replica.tokens <= BUSY_TOKENS for replica in usable):
                return True
            await asyncio.sleep(PAUSE_SECONDS)
        return False

    async def _send(self, model: ServedModel, part: list[RecentItem]) -> int:
        """Compute a part; return how many of its items other engines have now. One that fails is not repeated: its items are
        computed when they are asked for."""
        ends = [item.pinned_until - self._clock() for item in part]
        pin = min(ends) if min(ends) > 0 else None
        rows, queued, moved = [item.ids for item in part], [0.0], 0
        caller = wire.Caller(tenant=TENANT, weight=WEIGHT, cache_salt=part[0].salt)
        owner = model.with_adapter(part[0].adapter)
        if owner is None or not owner.usable:  # the adapter was unloaded, or no other engine has it
            return 0
        asked = Prompts((), rows, any_readout(owner.info), PRIORITY_RANGE[1], caller, _QUERY, pin)

        def take(places: list[int], scored: wire.Scored) -> None:
            nonlocal moved
            moved += len(places)
            self._telemetry.catalogues.items_moved(scored.cached_items, len(places) - scored.cached_items)
            queued.append(scored.queue_seconds)

        try:
            await self._fan_out.run(owner, asked, rows, take, None)
        except GatewayError as error:
            logger.info("a handover waits: %s", error)
            queued.append(MAX_PAUSE_SECONDS)
        if max(queued) > QUEUED_SECONDS:
            await asyncio.sleep(min(MAX_PAUSE_SECONDS, 10 * max(queued)))
        return moved


def parts_of(items: list[RecentItem], now: float) -> Iterator[list[RecentItem]]:
    """Divide items, about in their order, into parts of at most :data:`PART_TOKENS`. All items of a part have one salt and one
    adapter, and all or none of them are pinned."""
    parts: dict[tuple[str, str, bool], list[RecentItem]] = {}
    room: dict[tuple[str, str, bool], int] = {}
    for item in items:
        kind = (item.salt, item.adapter, item.pinned_until > now)
        if kind in parts and room[kind] < item.tokens:
            yield parts.pop(kind)
        if kind not in parts:
            parts[kind], room[kind] = [], PART_TOKENS
        parts[kind].append(item)
        room[kind] -= item.tokens
    yield from parts.values()
