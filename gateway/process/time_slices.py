"""Divides long loops into slices, so that the event loop serves other requests in between."""

from __future__ import annotations

import asyncio
import time

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
