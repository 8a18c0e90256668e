"""Deadlines of requests, the nearest first."""

from __future__ import annotations

import heapq

from engine.requests.core import Request


class Deadlines:
    """The requests that have a deadline. One that has ended is dropped when its deadline passes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        """Note the deadline of a request, if it has one."""
        if request.expires is not None:
            heapq.heappush(self._heap, (request.expires, request.arrival, request))

    def passed(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline is at ``now`` or before."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            late.append(heapq.heappop(self._heap)[2])
        return late
