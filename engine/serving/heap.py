"""Gives free memory of the loop process back to the kernel while there is no work.

The variables in :mod:`engine.serving.environment` keep freed temporaries in the heap, because faulting them in again takes longer
than the products that use them. Requests of ever new sizes divide the heap into blocks that later ones do not fit, so it grows
although what is allocated does not. glibc's ``malloc_trim`` returns the free pages within all arenas; later requests fault them in
again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

GROWTH_BYTES = 256 << 20
"""Growth of the resident memory since the last time that makes it worth while: more than requests of one size need again."""
PAUSE_SECONDS = 10.0
"""Shortest time between two attempts."""

_STATM = Path("/proc/self/statm")


class Heap:
    """Trims the heap of this process; does nothing without glibc or ``/proc``. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._malloc_trim = _malloc_trim() if _STATM.exists() else None
        self._clock = clock
        self._least = resident_bytes() if self._malloc_trim else 0
        self._tried = -PAUSE_SECONDS

    def trim(self) -> bool:
        """Return free memory if the process has grown by :data:`GROWTH_BYTES` since the last time. Call this only without work:
        it took 54 ms of processor time for 300 MiB. Return whether it was tried."""
        if self._malloc_trim is None or (before := resident_bytes()) < self._least + GROWTH_BYTES:
            return False
        began = self._clock()
        if began - self._tried < PAUSE_SECONDS:
            return False
        self._malloc_trim(0)
        self._tried = self._clock()
        self._least = resident_bytes()
        logger.info("returned %d MiB of free memory in %.1f ms", before - self._least >> 20, 1000 * (self._tried - began))
        return True


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function; None where the C library has none, as musl."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
