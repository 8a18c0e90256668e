"""Measures how long the event loop runs without serving what is due.

A timer expires every :data:`BUSY_SECONDS` while the loop has work. A late timer was delayed by this process or by others on the
machine. Only the former counts: the delay is bounded by the CPU time that the loop's thread used since the previous timer. The
error is therefore at most one interval in either direction. The delay covers all callbacks of one event loop iteration, so it is an
upper bound for the longest callback. A loop that is mostly idle gets longer intervals, because each timer wakes the process, which
costs as much as a streamed token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gateway.ops.metrics import Telemetry

BUSY_SECONDS = 0.005
"""Interval while requests are in flight and the loop uses at least :data:`BUSY_SHARE` of a processor. It costs about 1 % of one."""
BUSY_SHARE = 0.5
"""Below this share of a processor, many timers would wake the process: 2 % of the CPU time of a streamed chat at a share of 0.2."""
CALM_SECONDS = 0.025
"""Interval while requests are in flight and the loop uses less."""
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
        self._began = 0.0
        self._due = 0.0
        self._used = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, after: float = 0.0) -> None:
        """Begin to measure after ``after`` seconds."""
        self._timer = asyncio.get_running_loop().call_later(after, self._begin)

    def _begin(self) -> None:
        self._plan(self._wall(), self._cpu(), BUSY_SECONDS)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer:
            self._timer.cancel()

    def tick(self) -> None:
        """Measure the delay of the expired timer and start the next one."""
        wall, cpu = self._wall(), self._cpu()
        blocked = min(wall - self._due, cpu - self._used)
        if blocked > LEAST_SECONDS:
            self._telemetry.process.blocked(blocked)
        if not self._telemetry.in_flight:
            seconds = IDLE_SECONDS
        elif cpu - self._used >= BUSY_SHARE * (wall - self._began):
            seconds = BUSY_SECONDS
        else:
            seconds = CALM_SECONDS
        self._plan(wall, cpu, seconds)

    def _plan(self, wall: float, cpu: float, seconds: float) -> None:
        self._began, self._used, self._due = wall, cpu, wall + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self.tick)
