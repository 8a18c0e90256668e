"""A queue that is fair between tenants by the time that their jobs take, which is known only when they have ended.

Each tenant has a virtual time: the seconds of workers that it used, divided by its weight. The next job is one of the tenant with
the lowest virtual time. A job adds its estimated cost when it begins, and the difference from the real one when it ends. A tenant
that was idle begins at the queue's virtual time, that of the job which began last, so it saves up nothing. This is start-time fair
queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with costs that are corrected afterwards, as in the virtual token counter of Sheng et
al. (OSDI 2024).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_REMEMBERED = 1024
"""Number of known tenants above which tenants without a debt are forgotten."""


class _Entry(NamedTuple, Generic[T]):
    number: int
    item: T
    cost: float
    """Estimated seconds, divided by the tenant's weight."""


@dataclass
class FairJobQueue(Generic[T]):
    """Jobs in two classes, small and bulk, so that the consumer may leave bulk jobs waiting."""

    _waiting: dict[bool, dict[str, deque[_Entry[T]]]] = field(default_factory=lambda: {False: {}, True: {}})
    """By class and tenant."""
    _used: dict[str, float] = field(default_factory=dict)
    """Virtual times."""
    _virtual: float = 0.0
    _numbers: count[int] = field(default_factory=count)
    _length: int = 0

    def __len__(self) -> int:
        return self._length

    def push(self, item: T, *, tenant: str, cost: float, weight: float = 1.0, bulk: bool = False) -> None:
        """Add ``item``, which must not be in the queue."""
        if not any(tenant in waiting for waiting in self._waiting.values()):
            self._used[tenant] = max(self._virtual, self._used.get(tenant, 0.0))
        self._waiting[bulk].setdefault(tenant, deque()).append(_Entry(next(self._numbers), item, cost / weight))
        self._length += 1

    def passed(self, *, tenant: str, cost: float, weight: float = 1.0) -> None:
        """Account for an item that found the queue empty, as if it was added and removed."""
        self._virtual = max(self._virtual, self._used.get(tenant, 0.0))
        self._used[tenant] = self._virtual + cost / weight
        self._forget()

    def corrected(self, *, tenant: str, more: float, weight: float = 1.0) -> None:
        """Account for a job that took ``more`` seconds than estimated; negative if it took less."""
        self._used[tenant] = self._used.get(tenant, self._virtual) + more / weight

    def pop(self, *, bulk: bool) -> T | None:
        """Remove and return the next item, or with ``bulk`` False the next small one; None if there is none."""
        classes = (False, True) if bulk else (False,)
        heads = [(self._used[tenant], jobs[0].number, tenant, of) for of in classes for tenant, jobs in self._waiting[of].items()]
        if not heads:
            return None
        used, _, tenant, of = min(heads)
        entry = self._waiting[of][tenant].popleft()
        self._removed(of, tenant)
        self._virtual = max(self._virtual, used)
        self._used[tenant] = used + entry.cost
        self._forget()
        return entry.item

    def discard(self, item: T) -> None:
        """Remove ``item`` from the queue."""
        for of, waiting in self._waiting.items():
            for tenant, jobs in waiting.items():
                for entry in jobs:
                    if entry.item is item:
                        jobs.remove(entry)
                        self._removed(of, tenant)
                        return

    def _removed(self, of: bool, tenant: str) -> None:
        self._length -= 1
        if not self._waiting[of][tenant]:
            del self._waiting[of][tenant]

    def _forget(self) -> None:
        """Forget tenants without a debt if there are many. Those with waiting jobs stay known."""
        if len(self._used) > _REMEMBERED:
            waits = self._waiting[False].keys() | self._waiting[True].keys()
            self._used = {tenant: used for tenant, used in self._used.items() if used > self._virtual or tenant in waits}
