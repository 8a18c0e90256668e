"""Measures how long the event loop runs without serving what is due.

A timer expires every :data:`BUSY_SECONDS` while requests are in flight. A late timer was delayed by this process or by others on
the machine. Only the former counts: the delay is bounded by the CPU time that the loop's thread used since the previous timer. The
error is therefore at most :data:`BUSY_SECONDS` in either direction. The delay covers all callbacks of one event loop iteration, so
it is an upper bound for the longest callback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gateway.telemetry import Telemetry

BUSY_SECONDS = 0.005
"""Interval while requests are in flight. It costs about 0.1 % of a processor."""
IDLE_SECONDS = 0.05
LEAST_SECONDS = 0.001
"""Shortest delay that counts, because timers are accurate to a millisecond."""


class Watchdog:
    """Measures the running event loop between :meth:`start` and :meth:`stop`."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._telemetry = telemetry
        self._wall = wall
        self._cpu = cpu
        self._due = 0.0
        self._used = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, after: float = 0.0) -> None:
        """Begin to measure after ``after`` seconds."""
        self._timer = asyncio.get_running_loop().call_later(after, self._plan)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer:
            self._timer.cancel()

    def tick(self) -> None:
        """Measure the delay of the expired timer and start the next one."""
        blocked = min(self._wall() - self._due, self._cpu() - self._used)
        if blocked > LEAST_SECONDS:
            self._telemetry.blocked(blocked)
        self._plan()

    def _plan(self) -> None:
        seconds = BUSY_SECONDS if self._telemetry.in_flight else IDLE_SECONDS
        self._used = self._cpu()
        self._due = self._wall() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self.tick)
