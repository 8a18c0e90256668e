"""The speed of one core in Python, as a unit for tests that bound processor time: machines differ by a factor of three."""

from __future__ import annotations

import time
from functools import cache

_TURNS, _TRIES = 200_000, 5


@cache
def turn_seconds() -> float:
    """Return the processor time of one turn of a loop that adds squares, in seconds; the least of some tries."""
    return min(_loop() for _ in range(_TRIES)) / _TURNS


def _loop() -> float:
    start, total = time.process_time(), 0
    for turn in range(_TURNS):
        total += turn * turn
    return time.process_time() - start
