"""Detection of engines that do not answer probes in time, and the clock that measures that time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from gateway.pool.replica import Replica

TICK_SECONDS = 0.25
"""Interval between two checks of all replicas."""
LATE_SECONDS = 0.1
"""Tolerated delay of a tick. A longer delay means that this process was blocked or stopped."""


class AwakeClock:
    """Monotonic seconds during which this process could receive messages.

    The clock advances by at most ``TICK_SECONDS + LATE_SECONDS`` between two ticks. A gateway that was blocked or suspended for an
    hour therefore treats no engine as silent, whichever of its tasks runs first afterwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked = clock()
        self._awake = 0.0

    def now(self) -> float:
        """Seconds since the clock was created."""
        return self._awake + min(self._clock() - self._ticked, TICK_SECONDS + LATE_SECONDS)

    def tick(self) -> None:
        """Advance the clock. Must be called every :data:`TICK_SECONDS`."""
        self._awake, self._ticked = self.now(), self._clock()


async def watch_silence(
    clock: AwakeClock, replicas: Callable[[], Iterable[Replica]], seconds: float, found: Callable[[Replica], None]
) -> None:
    """Call ``found`` for each replica that leaves a probe unanswered for ``seconds``; once, until the replica answers again. Runs
    until cancelled."""
    while True:
        clock.tick()
        now = clock.now()
        for replica in list(replicas()):
            since = replica.unanswered_since
            if since is not None and not replica.silent and now - since > seconds:
                replica.silent = True
                found(replica)
        await asyncio.sleep(TICK_SECONDS)
