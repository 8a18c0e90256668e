"""The process's heap: when Python collects garbage, and settings of glibc's allocator that return memory after a burst."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

from gateway.ops.metrics import Telemetry

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 32 << 10
"""Size from which an allocation gets its own memory mapping, which is unmapped when it is freed. Parts of a body have 64 KB. By
default glibc raises this threshold with each large block that is freed and keeps 100 MB of parts after a burst; trimming them at
once then takes 10 ms."""
SPARE_BYTES = 1 << 20

YOUNG_OBJECTS = 700
"""New objects after which Python examines them, its default. That takes 0.1 ms."""
MIDDLE_AGED = 10
"""Collections of new objects after which those that survived are examined again, Python's default. That takes 0.5 ms."""
NEVER = 1 << 30
MOST_PUT_OFF = 100
"""Middle collections after which a full one is overdue: 0.8 million objects have become old since the last, about 100 MB."""
OVERDUE_SECONDS = 60.0


class GarbageCollection:
    """Collects Python's garbage while no request is in progress.

    A full collection examines every object that was created after the start. Those of a request with a thousand prompts take 5 to
    10 ms, and Python collects in the middle of such requests, because they create many objects. With this class Python collects
    young objects only, and full collections run between requests. Without a pause between requests, one runs when it is overdue.
    Objects without reference cycles need no collection.
    """

    def __init__(
        self, telemetry: Telemetry, *, collect: Callable[[], object] = gc.collect, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._telemetry = telemetry
        self._collect = collect
        self._clock = clock
        self._collected = clock()

    def start(self) -> None:
        """Take over from Python. The objects of now are never examined again, because that would take 50 ms."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, MIDDLE_AGED, NEVER)
        self._collected = self._clock()

    def tick(self) -> None:
        """Collect if it is time to. Called a few times per second."""
        put_off = gc.get_count()[2]
        if not put_off:
            return
        now = self._clock()
        if not self._telemetry.in_flight:
            reason = "idle"
        elif put_off >= MOST_PUT_OFF or now - self._collected >= OVERDUE_SECONDS:
            reason = "overdue"
        else:
            return
        self._collect()
        self._collected = now
        self._telemetry.process.collections.labels(reason).inc()


def return_freed_memory() -> None:
    """Apply the settings to this process, if its C library supports them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, SPARE_BYTES)
