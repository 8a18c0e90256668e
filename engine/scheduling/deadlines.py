"""Deadlines of requests, the nearest first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from engine.requests.core import Request

FEW = 64


class Deadlines:
    """The requests that have a deadline. It refers to them by id, so that it keeps no request that has ended: most end long before
    their deadline, and each has its prompt."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        """``requests``: those that have not ended, by id."""
        self._requests = requests
        self._heap: list[tuple[float, int, str]] = []
        """Deadline, arrival and id."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Note the deadline of a request, if it has one."""
        if request.expires is None:
            return
        heapq.heappush(self._heap, (request.expires, request.arrival, request.id))
        if len(self._heap) > 2 * len(self._requests) + FEW:
            self._heap = [entry for entry in self._heap if self._of(entry) is not None]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> list[Request]:
        """Forget the deadlines at ``now`` or before, and return their requests."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            request = self._of(heapq.heappop(self._heap))
            if request is not None:
                late.append(request)
        return late

    def _of(self, entry: tuple[float, int, str]) -> Request | None:
        """The request of an entry; None if it has ended. A later request may have its id."""
        _, arrival, request_id = entry
        request = self._requests.get(request_id)
        return request if request is not None and request.arrival == arrival else None
