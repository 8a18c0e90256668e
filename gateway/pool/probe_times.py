"""Times of the probes of engines."""

from __future__ import annotations

import itertools
import math

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
"""Its multiples modulo 1 are evenly spread, however many there are (Knuth, The Art of Computer Programming 3, section 6.4)."""
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
        self._count = itertools.count()

    def phase(self) -> float:
        """Return the phase for another engine, from 0 to 1."""
        return next(self._count) * GOLDEN_RATIO % 1

    def pause(self, phase: float, now: float) -> float:
        """Return the seconds from ``now`` to the next probe of the engine with ``phase``, at most 1.1 intervals."""
        part = (phase - now / self._seconds) % 1
        return self._seconds * (part if part > SHORTEST_PAUSE else part + 1)
