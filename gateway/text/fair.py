"""A queue that is fair between tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

A job's start tag is the later of the queue's virtual time and the finish tag of its tenant's previous job; its finish tag is the
start tag and its cost divided by its tenant's weight. The job with the lowest start tag is next. So a tenant that sends a lot
waits for its own jobs, and one that sends little is next.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

_REMEMBERED = 1024
"""Tenants after which those without a debt are forgotten."""


@dataclass(order=True)
class _Entry(Generic[T]):
    start: float
    number: int
    item: T = field(compare=False)


class FairQueue(Generic[T]):
    """Jobs in two classes, small and bulk, so that the one who takes may leave bulk jobs waiting."""

    def __init__(self) -> None:
        self._heaps: dict[bool, list[_Entry[T]]] = {False: [], True: []}
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._numbers = count()
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values())) - len(self._gone)

    def push(self, item: T, *, tenant: str, cost: float, weight: float = 1.0, bulk: bool = False) -> None:
        """Add ``item``, which must not be in the queue yet."""
        start = max(self._virtual, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost / weight
        heapq.heappush(self._heaps[bulk], _Entry(start, next(self._numbers), item))

    def pop(self, *, bulk: bool) -> T | None:
        """The next item, or the next that is not bulk; None where there is none."""
        heads = [heap for heap in ([self._heaps[False], self._heaps[True]] if bulk else [self._heaps[False]]) if self._head(heap)]
        if not heads:
            return None
        entry = heapq.heappop(min(heads, key=lambda heap: heap[0]))
        self._virtual = entry.start
        if len(self._finish) > _REMEMBERED:
            self._finish = {tenant: finish for tenant, finish in self._finish.items() if finish > self._virtual}
        return entry.item

    def discard(self, item: T) -> None:
        """Take ``item`` out, wherever it stands."""
        for heap in self._heaps.values():
            self._gone |= {entry.number for entry in heap if entry.item is item}

    def _head(self, heap: list[_Entry[T]]) -> bool:
        """Whether there is one, after those that were discarded are gone."""
        while heap and heap[0].number in self._gone:
            self._gone.discard(heapq.heappop(heap).number)
        return bool(heap)
