"""Allocates and frees slots, and takes slots and running places from requests for others.

A slot is free, or in a prefix cache, or owned by one branch of a running request. If no slot is free, the allocator evicts from
the prefix cache of the model and then, for a running request, preempts others. Slots are
freed and taken again without waiting for pending steps, because a later step writes later.

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

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from yardstick_llm.engine.ints import EMPTY, Ints
from yardstick_llm.engine.kvcache.prefix_cache import PrefixCache, SlotPool
from yardstick_llm.engine.requests.batch import CandidatePass
from yardstick_llm.engine.requests.core import Branch, ItemBlock, Request
from yardstick_llm.engine.scheduling.fair_queue import FairQueue, Flow

TURN = 8
"""Steps after which an adapter leaves its place to one that waits."""
REMEMBERED = 4096
"""Adapters whose last turn is remembered."""


class AdapterTurns:
    """Chooses the adapters of each step.

    Up to the number of slots of the device nothing is restricted. Beyond it, adapters take turns of :data:`TURN` steps, in the
    order in which their last turn ended, so each adapter with a request is served after a bounded number of steps, and a swap pays
    for several steps.
    """

    def __init__(self, most: int = 0) -> None:
        """``most``: adapters of a step; 0: requests have none."""
        self._most = most
        self._step: dict[str, None] = {}
        """Adapters of this step."""
        self._since: dict[str, int] = {}
        """Adapters in turn, and the step in which their turn began."""
        self._ended: dict[str, int] = {}
        """Number of the end of an adapter's last turn, among all ends."""
        self._ends = 0
        self._closed = False
        self._number = 0

    def begin(self, requests: Iterable[Request]) -> None:
        """Begin a step. ``requests``: running ones, and the first waiting one of each tenant."""
        if not self._most:
            return
        self._number += 1
        wanted = dict.fromkeys(request.adapter.digest for request in requests if request.adapter is not None)
        self._closed = len(wanted) > self._most
        if not self._closed:
            self._step.clear()
            self._since = {digest: self._since.get(digest, self._number) for digest in wanted}
            return
        self._rotate(wanted)
        self._step = dict.fromkeys(self._since)

    def takes(self, request: Request) -> bool:
        """Whether this step may compute a part of ``request``."""
        if request.adapter is None or request.adapter.digest in self._step:
            return True
        if self._closed or len(self._step) >= self._most:
            return False
        self._step[request.adapter.digest] = None
        return True

    def _rotate(self, wanted: dict[str, None]) -> None:
        """End the turns of adapters without requests, then turns that are over, and give their places to waiting adapters."""
        for digest in [digest for digest in self._since if digest not in wanted]:
            self._end(digest)
        waiting = sorted((digest for digest in wanted if digest not in self._since), key=lambda digest: self._ended.get(digest, 0))
        over = sorted(
            (digest for digest, begun in self._since.items() if self._number - begun >= TURN), key=self._since.__getitem__
        )
        for digest in over[: max(0, len(waiting) - (self._most - len(self._since)))]:
            self._end(digest)
        for digest in waiting[: self._most - len(self._since)]:
            self._since[digest] = self._number

    def _end(self, digest: str) -> None:
        del self._since[digest]
        self._ended.pop(digest, None)
        self._ends += 1
        self._ended[digest] = self._ends
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]


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
        return next((request for request in _preemptible(most, step) if request.takes_place), None)

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


class KVPool(NamedTuple):
    """Slots and prefix cache of one model."""

    pool: SlotPool
    cache: PrefixCache


class Allocator:
    """Owns the slots of all models and the running places. Flows count the slots that their requests hold."""

    def __init__(self, pools: Iterable[SlotPool], queue: FairQueue, reserved_share: float, max_adapters: int = 0) -> None:
        """pools: one for each model. reserved_share: see :attr:`~engine.settings.EngineSettings.reserved_share`."""
        self._reserved_share = reserved_share
        self.kv_pools = [KVPool(pool, PrefixCache(pool, self.reserved(pool))) for pool in pools]
        self.running: dict[int, Request] = {}
        """Admitted requests by arrival, in order of admission."""
        self.items_running = 0
        """Running requests of an :class:`ItemGroup`."""
        self.without_place = 0
        """Running requests that take no running place: items and forecasts."""
        self.other_item_tokens = 0
        """Slots that items hold beside :attr:`PrefixCache.held_item_tokens`, in all pools: those of their branches, and all slots
        of items that keep nothing."""
        self.step = 0
        """Number of the step being scheduled; requests that are already in it are not preempted."""
        self.flows = queue.flows
        """All flows, by tenant."""
        self.turns = AdapterTurns(max_adapters)
        """Adapters of the step that is being scheduled."""
        self._preemption = Preemption(queue, self.running)
        self._queue = queue

    def kv_pool(self, request: Request) -> KVPool:
        """Return the KV pool of the model that computes ``request``."""
        return self.kv_pools[request.on_lenvm]

    def reserved(self, pool: SlotPool) -> int:
        """Slots that items leave to generations and queries, in use or cached."""
        return int(self._reserved_share * pool.size)

    def allocate(self, count: int, request: Request, branch: Branch | None, *, may_preempt: bool) -> Ints:
        """Return ``count`` slots for ``branch`` (None: the prefix), or none at all."""
        pool, cache = self.kv_pools[request.on_lenvm]
        while pool.available < count:
            if cache.evict(count - pool.available):
                continue
            if not may_preempt or not self._preempt_behind(request, branch):
                return EMPTY
        return pool.allocate(count)

    def has_room(self, kv_pool: int, count: int) -> bool:
        """Return whether ``count`` slots of a model can be allocated without preemption."""
        pool, cache = self.kv_pools[kv_pool]
        return pool.available + cache.evictable >= count

    def leaves_reserve(self, request: Request) -> bool:
        """Whether a waiting request may begin without touching what items leave to others. The only running item may."""
        return request.group is None or not self.items_running or request.size <= self.left_to_items(request)

    def left_to_items(self, request: Request) -> int:
        """Slots that items beside the running ones may hold, on the model of ``request``."""
        pool, cache = self.kv_pool(request)
        return pool.size - self.reserved(pool) - cache.held_item_tokens - self.other_item_tokens

    def _preempt_behind(self, request: Request, branch: Branch | None) -> bool:
        """Free slots of this model: those of another request or, if no other has any to give, of a later branch of ``request``."""
        kv_pool = int(request.on_lenvm)
        victim = self._preemption.for_running(request.main_request, kv_pool, self.kv_pool(request).pool.size, self.step)
        if victim is not None:
            self.preempt(victim)
            return True
        for other in reversed(request.branches):
            if other is branch:
                return False
            if other.computed:
                self.free(other)
                return True
        return False

    def victim_for_place(self, flow: Flow) -> Request | None:
        """Return the request that gives up its running place to a waiting request of ``flow``; None if there is none."""
        return self._preemption.for_place(flow, self.step)

    def victims_for_slots(self, flow: Flow, part: Request) -> list[Request] | None:
        """Return the requests to preempt so that a waiting request can begin on its model, beside the decoding branches. None if
        the tenant may not take enough.
        """
        pool, cache = self.kv_pool(part)
        known = cache.matched_length(part.salt, part.prefix)
        need = min(flow.room, part.main_request.size - known)
        decoding = sum(len(request.branches) for request in self.running.values() if request.reserve)
        lacking = need + decoding - (pool.available + max(0, cache.evictable - known))
        return self._preemption.for_waiting(flow, int(part.on_lenvm), pool.size, need, lacking, self.step)

    def preempt(self, request: Request) -> None:
        """Free everything that a running request holds, and return it to the queue at its old rank."""
        assert not request.awaits_result
        self.release(request)
        for part in request.with_aux:
            if not part.begun:
                part.cached_tokens = 0
        self._queue.wait(request)

    def count_running(self, request: Request, count: int) -> None:
        """Count a request that begins or ends to run."""
        self.items_running += count * (request.group is not None)
        self.without_place += count * (not request.takes_place)

    def release(self, request: Request) -> None:
        """Free all slots, and the running place if it has one."""
        if isinstance(request, ItemBlock):
            self._free_block(request)
        else:
            for part in request.with_aux:
                self._free(part)
        if self.running.pop(request.arrival, None) is not None:
            self.count_running(request, -1)
            self._queue.stop(request)

    def _free(self, part: Request) -> None:
        for branch in part.branches:
            self.free(branch)
        if part.node is not None:
            self.kv_pool(part).cache.release(part.node)
            part.node = None
        part.prefix_slots.clear()
        if part.taken:
            self.count_taken(part, -part.taken)

    def _free_block(self, block: ItemBlock) -> None:
        pool, cache = self.kv_pool(block)
        self.count_taken(block, -block.slots.size, block.branches[0])
        pool.free(block.slots)
        cache.release(*(item.node for item in block.items if item.node is not None))

    def free(self, branch: Branch) -> None:
        """Free the slots of a branch, which is then computed again or ends."""
        slots = branch.slots
        self.count_taken(branch.request, -len(slots), branch)
        self.kv_pool(branch.request).pool.free(slots)
        branch.context.clear()
        if not branch.drawn:
            branch.prompt_logprobs.clear()

    def insert_prefix(self, branch: Branch) -> None:
        """Insert a finished generation into the prefix cache, unless the request keeps nothing, and free its other slots."""
        pool, cache = self.kv_pool(branch.request)
        kept, slots = 0, branch.slots
        self.count_taken(branch.request, -len(slots))
        if branch.request.node is not None and branch.request.salt is not None:
            kept = min(len(branch.tokens), len(slots))  # a step in flight may draw one more token
            cache.adopt(branch.request.node, branch.tokens.view[:kept], slots[:kept])
        pool.free(slots[kept:])
        branch.context.clear()

    def release_unused(self, candidate_pass: CandidatePass) -> None:
        """Free the slots of a pass that was not computed, because the draw was decided without the length model. Its pending tokens
        stay pending."""
        pending = len(candidate_pass.pending.tokens) if candidate_pass.pending else 0
        self.kv_pool(candidate_pass.branch.request).pool.free(candidate_pass.branch.context.drop(pending + 1))
        self.count_taken(candidate_pass.branch.request, -pending - 1)

    def count_taken(self, request: Request, count: int, branch: Branch | None = None) -> None:
        """Count slots that ``request`` took from the pool for ``branch`` (None: its prefix); a negative number was given back."""
        request.taken += count
        if request.group is not None and (branch is not None or request.salt is None):
            self.other_item_tokens += count
        self.flows[request.caller.tenant].held[request.on_lenvm] += count
