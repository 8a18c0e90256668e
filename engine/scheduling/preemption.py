"""Chooses which requests lose their place or their slots to others; the scheduler preempts them.

A preempted request returns to the queue of its tenant, at its old rank. Three rules keep tenants from taking the same things from
each other for ever:

- A tenant takes a place only where the other has more of them, relative to its weight, than the tenant has afterwards. It takes
  slots up to its share of them (a first request may need more), from tenants that have more than theirs; and for a further
  request only where the other keeps its share. So the other may not take the same back.
- No tenant takes anything from the oldest running request of another one, which so makes progress.
- The exception is a running request that is the oldest of its tenant and finds nothing else to take: it takes from requests that
  were admitted after it. So the request that was admitted first makes progress whatever the others do.

Requests that are already in the step being scheduled, or that only await a result, are never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.requests.core import Request
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.flow import Flow


class Preemption:
    """Chooses victims among the running requests."""

    def __init__(self, queue: FairQueue, running: dict[int, Request]) -> None:
        """running: the scheduler's running requests of all tenants, in order of admission."""
        self._queue = queue
        self._running = running

    def for_place(self, flow: Flow, step: int) -> Request | None:
        """Choose a request that gives up its running place to a waiting request of ``flow``."""
        most = max(self._others(flow), key=lambda other: len(other.running) / other.weight, default=None)
        if most is None or (len(flow.running) + 1) / flow.weight >= len(most.running) / most.weight:
            return None
        return next(_preemptible(most, step), None)

    def for_waiting(self, flow: Flow, kv_pool: int, slots: int, need: int, lacking: int, step: int) -> list[Request] | None:
        """Choose requests that give up ``lacking`` of a KV pool's ``slots`` to a waiting request of ``flow`` that begins with
        ``need`` slots.

        At each point, the newest request of the tenant that holds most comes first. None where the tenant may not take as many.
        """
        share = self._share(slots)
        most = (flow.held[kv_pool] + need) / flow.weight
        if flow.running and most > share:
            return None
        most = max(most, share)
        held = {other: other.held[kv_pool] for other in self._others(flow)}
        candidates = {other: _preemptible(other, step) for other in held}
        chosen: list[Request] = []
        while lacking > 0:
            fullest = max(held, key=lambda other: held[other] / other.weight, default=None)
            if fullest is None or held[fullest] / fullest.weight <= most:
                return None
            victim = next(candidates[fullest], None)
            if victim is None or (flow.running and held[fullest] - _taken(victim, kv_pool) < share * fullest.weight):
                del held[fullest]
            elif freed := _taken(victim, kv_pool):
                held[fullest] -= freed
                lacking -= freed
                chosen.append(victim)
        return chosen

    def for_running(self, request: Request, kv_pool: int, slots: int, step: int) -> Request | None:
        """Choose a request that gives up some of a KV pool's ``slots`` to a running request.

        Where the tenant has less than its share: the newest request of the tenant that has most beyond its own share. Otherwise:
        the newest request of the same tenant. With one tenant that is the request that was admitted last.
        """
        flow = self._queue.of(request)
        own = _last_behind(request, flow.running, kv_pool, step)
        if not self._queue.shared:
            return own
        share = self._share(slots)
        other = self._above(share, flow, kv_pool, step) if flow.held[kv_pool] / flow.weight < share else None
        if other is None and own is None and request is flow.oldest:
            return _last_behind(request, self._running, kv_pool, step)
        return other or own

    def _share(self, slots: int) -> float:
        """Share of ``slots`` for a tenant of weight 1."""
        return slots / self._queue.weight

    def _above(self, share: float, flow: Flow, kv_pool: int, step: int) -> Request | None:
        """The newest request of the tenant other than ``flow`` that has most slots for its weight, and more than its share."""
        most, newest = share, None
        for other in self._others(flow):
            if other.held[kv_pool] / other.weight > most:
                found = next((each for each in _preemptible(other, step) if _taken(each, kv_pool)), None)
                if found is not None:
                    most, newest = other.held[kv_pool] / other.weight, found
        return newest

    def _others(self, flow: Flow) -> Iterator[Flow]:
        """Tenants with running requests, except ``flow``."""
        return (other for other in self._queue.working.values() if other is not flow)


def _preemptible(flow: Flow, step: int) -> Iterator[Request]:
    """Running requests that other tenants may preempt, the newest first."""
    oldest = flow.oldest
    return (request for request in reversed(flow.running.values()) if request is not oldest and _may_stop(request, step))


def _last_behind(request: Request, running: dict[int, Request], kv_pool: int, step: int) -> Request | None:
    """The last of ``running`` that holds slots of a KV pool, if it was admitted after ``request``."""
    for last in reversed(running.values()):
        if last is request:
            return None
        if _may_stop(last, step) and any(part.on_lenvm == kv_pool for part in last.with_aux):
            return last
    return None


def _may_stop(request: Request, step: int) -> bool:
    return request.step != step and not request.awaits_result


def _taken(request: Request, kv_pool: int) -> int:
    """Slots of a KV pool that a request took from the pool and holds."""
    return sum(part.taken for part in request.with_aux if part.on_lenvm == kv_pool)
