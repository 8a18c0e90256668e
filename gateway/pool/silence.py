"""Engines that do not answer probes in time, and the clock that measures that time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from gateway.pool.replica import Replica

TICK_SECONDS = 0.25
"""Time between two looks at all replicas."""
LATE_SECONDS = 0.1
"""A tick that is later than this was delayed by this process: its event loop was blocked, or it was stopped."""


class AwakeClock:
    """Monotonic seconds in which this process could receive something.

    It advances by at most ``TICK_SECONDS + LATE_SECONDS`` between two ticks, so a gateway that was blocked or suspended for an hour
    takes no engine for silent, whichever of its tasks runs first afterwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked = clock()
        self._awake = 0.0

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._awake + min(self._clock() - self._ticked, TICK_SECONDS + LATE_SECONDS)

    def tick(self) -> None:
        """To be called every :data:`TICK_SECONDS`."""
        self._awake, self._ticked = self.now(), self._clock()


async def watch_silence(
    clock: AwakeClock, replicas: Callable[[], Iterable[Replica]], seconds: float, found: Callable[[Replica], None]
) -> None:
    """Call ``found`` for each replica that leaves a probe unanswered for ``seconds``, once until it answers another one. Runs until
    cancelled."""
    while True:
        clock.tick()
        now = clock.now()
        for replica in list(replicas()):
            since = replica.unanswered_since
            if since is not None and not replica.silent and now - since > seconds:
                replica.silent = True
                found(replica)
        await asyncio.sleep(TICK_SECONDS)
