"""All open connections of a gateway: how many there are, which of them wait for a request, and whose time is up."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

from gateway.logs.access import AccessLog
from gateway.settings import Settings
from gateway.telemetry import Telemetry

SWEEP_SECONDS = 0.25
"""Time between two checks of all deadlines. One timer for all connections: a timer for each costs more than the check."""
REFUSED_AT_ONCE = 256
"""Connections beyond the limit that are answered 429 at a time. Others beyond it are closed without an answer."""


class Connection(Protocol):
    """A connection as the registry sees it."""

    def check_deadlines(self, now: float) -> None:
        """End the connection, or answer 408, if a deadline has passed. ``now`` is the event loop's time."""

    def evict(self) -> None:
        """Close: no request is in progress and the place is needed."""


class Connections:
    """The open connections. Bounded: a new one beyond ``max_connections`` takes the place of the one that waits longest for a
    request; where all of them work, it is refused."""

    def __init__(self, settings: Settings, telemetry: Telemetry, log: AccessLog | None) -> None:
        """``log``: where requests are logged that the application never sees."""
        self.settings = settings
        self.telemetry = telemetry
        self.log = log
        self.open: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        """Connections without a request in progress; the one that waits longest is first."""
        self._sweeping = False
        telemetry.watch_connections(lambda: len(self.open))

    @property
    def can_answer(self) -> bool:
        """Whether one more refused connection may stay open for its answer."""
        return len(self.open) <= self.settings.max_connections + REFUSED_AT_ONCE

    def admit(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> bool:
        """Count a new connection. False: there is no room for it; it should be refused."""
        self.open.add(connection)
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(SWEEP_SECONDS, self._sweep, loop)
        if len(self.open) > self.settings.max_connections and not self._evict_one():
            return False
        self._waiting[connection] = None
        return True

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""
        self.open.discard(connection)
        self._waiting.pop(connection, None)

    def works(self, connection: Connection) -> None:
        """A request arrived: the connection is not evicted any more."""
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """The connection waits for its next request."""
        self._waiting[connection] = None

    def _evict_one(self) -> bool:
        if not self._waiting:
            return False
        oldest, _ = self._waiting.popitem(last=False)
        self.open.discard(oldest)
        oldest.evict()
        self.telemetry.rejected("evicted")
        return True

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.open):
            connection.check_deadlines(now)
        self._sweeping = bool(self.open)
        if self._sweeping:
            loop.call_later(SWEEP_SECONDS, self._sweep, loop)
