"""Divides long loops into slices, so that the event loop serves other requests in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

SLICE_SECONDS = 0.001
FEW_ROWS = 32
ROWS_AT_ONCE = 512
TOKENS_AT_ONCE = 1 << 16


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


async def pause_if(long: bool) -> None:
    """Let the event loop run other tasks if the work before was ``long``."""
    if long:
        await asyncio.sleep(0)


class Pace:
    """Spreads the work of many ready tasks over several event loop iterations: in each iteration they run for about a millisecond
    in total."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_SECONDS
        self._renewing = False

    async def step(self) -> None:
        """Wait for an iteration with time left."""
        while time.perf_counter() > self._until:
            if not self._renewing:
                self._renewing = True
                asyncio.get_running_loop().call_soon(self._renew)
            await asyncio.sleep(0)

    def _renew(self) -> None:
        self._until = time.perf_counter() + SLICE_SECONDS
        self._renewing = False


def slices(rows: Sequence[Sequence[T]]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of runs of ``rows``; each run is about a millisecond of work."""
    if len(rows) <= FEW_ROWS and sum(map(len, rows)) <= TOKENS_AT_ONCE:
        yield 0, len(rows)
        return
    begin = items = 0
    for place, row in enumerate(rows):
        items += len(row)
        if place + 1 - begin == ROWS_AT_ONCE or items > TOKENS_AT_ONCE:
            yield begin, place + 1
            begin, items = place + 1, 0
    if begin < len(rows):
        yield begin, len(rows)
