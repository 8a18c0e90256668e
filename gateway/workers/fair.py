"""A queue that is fair between tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

A job's start tag is the later of the queue's virtual time and the finish tag of its tenant's previous job. Its finish tag is its
start tag plus its cost divided by its tenant's weight. The job with the lowest start tag is next. Thus a tenant with many jobs
waits for its own jobs, and the jobs of a tenant with few come first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

_REMEMBERED = 1024
"""Number of known tenants above which tenants without a debt are forgotten."""


@dataclass(order=True)
class _Entry(Generic[T]):
    start: float
    number: int
    item: T = field(compare=False)


class FairJobQueue(Generic[T]):
    """Jobs in two classes, small and bulk, so that the consumer may leave bulk jobs waiting."""

    def __init__(self) -> None:
        self._heaps: dict[bool, list[_Entry[T]]] = {False: [], True: []}
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._numbers = count()
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values())) - len(self._gone)

    def push(self, item: T, *, tenant: str, cost: float, weight: float = 1.0, bulk: bool = False) -> None:
        """Add ``item``, which must not be in the queue."""
        heapq.heappush(self._heaps[bulk], _Entry(self._start(tenant, cost, weight), next(self._numbers), item))

    def passed(self, *, tenant: str, cost: float, weight: float = 1.0) -> None:
        """Account for an item that found the queue empty, as if it was added and removed."""
        self._virtual = self._start(tenant, cost, weight)
        self._forget()

    def _start(self, tenant: str, cost: float, weight: float) -> float:
        """Return the start tag of a tenant's next job, and record its finish tag."""
        start = max(self._virtual, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost / weight
        return start

    def _forget(self) -> None:
        """Forget tenants without a debt if there are many."""
        if len(self._finish) > _REMEMBERED:
            self._finish = {tenant: finish for tenant, finish in self._finish.items() if finish > self._virtual}

    def pop(self, *, bulk: bool) -> T | None:
        """Remove and return the next item, or with ``bulk`` False the next small one; None if there is none."""
        heads = [heap for heap in ([self._heaps[False], self._heaps[True]] if bulk else [self._heaps[False]]) if self._head(heap)]
        if not heads:
            return None
        entry = heapq.heappop(min(heads, key=lambda heap: heap[0]))
        self._virtual = entry.start
        self._forget()
        return entry.item

    def discard(self, item: T) -> None:
        """Remove ``item`` from the queue."""
        for heap in self._heaps.values():
            self._gone |= {entry.number for entry in heap if entry.item is item}

    def _head(self, heap: list[_Entry[T]]) -> bool:
        """Drop discarded entries from the top of ``heap``; return whether an entry is left."""
        while heap and heap[0].number in self._gone:
            self._gone.discard(heapq.heappop(heap).number)
        return bool(heap)
