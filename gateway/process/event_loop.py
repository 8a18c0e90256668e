"""The event loop: slices of long work, delays, and collections of garbage while it is idle.

A timer expires every :data:`BUSY_SECONDS` while the loop has work. A late timer was delayed by this process or by others on the
machine. Only the former counts: the delay is bounded by the CPU time that the loop's thread used since the previous timer. The
error is therefore at most one interval in either direction. The delay covers all callbacks of one event loop iteration, so it is an
upper bound for the longest callback. A loop that is mostly idle gets longer intervals, because each timer wakes the process, which
costs as much as a streamed token.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yardstick_llm.gateway.ops.metrics import Telemetry


SLICE_SECONDS = 0.001


class TimeSlice:
    """Limits how long a loop runs while no other task can: ``if time_slice.over: await time_slice.yield_to_loop()``."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_SECONDS

    @property
    def over(self) -> bool:
        """Whether the loop should let other tasks run."""
        return time.perf_counter() > self._until

    async def yield_to_loop(self) -> None:
        """Let the event loop run other tasks, and begin the next slice."""
        await asyncio.sleep(0)
        self._until = time.perf_counter() + SLICE_SECONDS


async def end_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks, and wait until they have ended."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


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
