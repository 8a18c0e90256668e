"""Times of the probes of engines."""

from __future__ import annotations

import itertools

SLOTS = 20
"""Points of time in an interval at which engines are probed. Of 100 engines, five are probed at once, which takes less than 1 ms.
All at once would delay streams, and one by one would take half as much CPU time again, because caches are cold each time."""
SHORTEST_PAUSE = 0.1
"""Shortest pause as a part of the interval. A timer may end a millisecond early, which must not lead to a second probe."""


class ProbeTimes:
    """Spreads the probes of engines over the interval between two probes of one engine.

    An engine has a phase in the interval for as long as it is watched. So the probes stay spread when they were delayed together,
    such as by a blocked event loop.
    """

    def __init__(self, seconds: float) -> None:
        """``seconds``: the interval."""
        self._seconds = seconds
        self._slots = itertools.cycle(range(SLOTS))

    def phase(self) -> float:
        """Return the phase for another engine, from 0 to 1."""
        return next(self._slots) / SLOTS

    def pause(self, phase: float, now: float) -> float:
        """Return the seconds from ``now`` to the next probe of the engine with ``phase``, at most 1.1 intervals."""
        part = (phase - now / self._seconds) % 1
        return self._seconds * (part if part > SHORTEST_PAUSE else part + 1)
