"""Registry of all open connections: their number, their deadlines, and which of them are idle."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

from gateway.ops.access_log import AccessLog
from gateway.ops.metrics import Telemetry
from gateway.settings import Settings

SWEEP_SECONDS = 0.25
"""Interval between checks of all deadlines. One timer serves all connections: a timer for each costs more than the check."""
REFUSED_AT_ONCE = 256
"""Most connections beyond the limit that are answered 429 at a time. Further ones are closed without an answer."""


class Connection(Protocol):
    """Interface of a connection to the registry."""

    def check_deadlines(self, now: float) -> None:
        """End the connection, or answer 408, if a deadline has passed. ``now`` is the event loop's time."""

    def evict(self) -> None:
        """Close an idle connection to make room for another."""


class Connections:
    """The open connections, bounded. A new connection beyond ``max_connections`` replaces the one that has been idle longest; if
    none is idle, the new one is refused."""

    def __init__(self, settings: Settings, telemetry: Telemetry, log: AccessLog | None) -> None:
        """``log``: log of requests that are answered without the application."""
        self.settings = settings
        self.telemetry = telemetry
        self.log = log
        self.open: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        """Connections without a request in progress, the longest idle first."""
        self._sweeping = False
        telemetry.open_connections.set_function(lambda: len(self.open))

    @property
    def can_answer(self) -> bool:
        """Whether one more refused connection may stay open to receive its answer."""
        return len(self.open) <= self.settings.max_connections + REFUSED_AT_ONCE

    def admit(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> bool:
        """Count a new connection. Returns False if there is no room and the caller should refuse it."""
        self.open.add(connection)
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(SWEEP_SECONDS, self._sweep, loop)
        if len(self.open) > self.settings.max_connections and not self._evict_one():
            return False
        self._waiting[connection] = None
        return True

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.open.discard(connection)
        self._waiting.pop(connection, None)

    def works(self, connection: Connection) -> None:
        """Mark a connection as busy, because a request arrived; it is not evicted while busy."""
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """Mark a connection as idle."""
        self._waiting[connection] = None

    def _evict_one(self) -> bool:
        if not self._waiting:
            return False
        oldest, _ = self._waiting.popitem(last=False)
        self.open.discard(oldest)
        oldest.evict()
        self.telemetry.rejected.labels("evicted").inc()
        return True

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.open):
            connection.check_deadlines(now)
        self._sweeping = bool(self.open)
        if self._sweeping:
            loop.call_later(SWEEP_SECONDS, self._sweep, loop)
