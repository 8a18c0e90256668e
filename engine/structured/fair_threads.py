"""Threads that run the jobs of several tenants in a fair order.

Start-time fair queueing as in :mod:`engine.scheduling.fair_queue`, with jobs as packets: the virtual time of a tenant is the time
that its jobs took, divided by its weight, and the next job is one of the tenant with the smallest virtual time. A job cannot be
interrupted, so the threads that one tenant may hold are bounded.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine import wire

REMEMBERED = 1024
"""Tenants without jobs whose virtual time is remembered, so that leaving between two jobs gains nothing."""


@dataclass(slots=True)
class _Flow:
    """The jobs of one tenant."""

    virtual: float
    weight: float = 1.0
    jobs: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)
    running: int = 0


class FairThreads:
    """Runs jobs in threads, which start with the first job."""

    def __init__(self, count: int, name: str, most: int = 1) -> None:
        """``count``: number of threads. ``most``: threads that the jobs of one tenant may hold."""
        self._count, self._name, self._most = count, name, most
        self._changed = threading.Condition()
        self._flows: dict[str, _Flow] = {}
        self._virtual = 0.0
        """Virtual time of the system: that of the last job's tenant when it began."""
        self._debts: OrderedDict[str, float] = OrderedDict()
        self._threads = 0
        self._closed = False

    def submit(self, caller: wire.Caller, job: Callable[[], Any]) -> Future[Any]:
        """Run ``job`` for a tenant, later. Cancel the future to leave it out."""
        future: Future[Any] = Future()
        with self._changed:
            flow = self._flows.get(caller.tenant)
            if flow is None:
                flow = self._flows[caller.tenant] = _Flow(max(self._virtual, self._debts.pop(caller.tenant, 0.0)))
            flow.weight = caller.weight
            flow.jobs.append((future, job))
            if self._threads < self._count:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the threads after the jobs in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (begun := self._begin()) is not None:
            tenant, future, job = begun
            began = time.perf_counter()
            try:
                result = job()
            except BaseException as error:  # for whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del begun, future, job
            self._end(tenant, time.perf_counter() - began)

    def _begin(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        """Wait for a job and take it from its flow; None when the threads are to end."""
        with self._changed:
            while not self._closed:
                ready = [entry for entry in self._flows.items() if entry[1].jobs and entry[1].running < self._most]
                if not ready:
                    self._changed.wait()
                    continue
                tenant, flow = min(ready, key=lambda entry: entry[1].virtual)
                future, job = flow.jobs.popleft()
                if future.set_running_or_notify_cancel():
                    self._virtual = max(self._virtual, flow.virtual)
                    flow.running += 1
                    return tenant, future, job
                self._leave(tenant, flow)
        return None

    def _end(self, tenant: str, seconds: float) -> None:
        with self._changed:
            flow = self._flows[tenant]
            flow.running -= 1
            flow.virtual = max(flow.virtual, self._virtual) + seconds / flow.weight
            self._leave(tenant, flow)
            self._changed.notify()

    def _leave(self, tenant: str, flow: _Flow) -> None:
        """Drop a flow without jobs."""
        if flow.jobs or flow.running:
            return
        del self._flows[tenant]
        if not self._flows:
            self._virtual = 0.0
            self._debts.clear()
        elif flow.virtual > self._virtual:
            self._debts[tenant] = flow.virtual
            if len(self._debts) > REMEMBERED:
                self._debts.popitem(last=False)
