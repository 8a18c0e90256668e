"""Allocates and frees slots, and takes slots and running places from requests for others.

A slot is free, or in a prefix cache, or owned by one branch of a running request. If no slot is free, the allocator evicts from
the prefix cache of the model and then, for a running request, preempts others (:mod:`engine.scheduling.preemption`). Slots are
freed and taken again without waiting for pending steps, because a later step writes later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.batch import CandidatePass
from engine.ints import EMPTY, Ints
from engine.kvcache.prefix_cache import PrefixCache
from engine.kvcache.slots import SlotPool
from engine.requests.core import Branch, Request
from engine.requests.item_group import ItemBlock
from engine.scheduling.adapter_turns import AdapterTurns
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.flow import Flow
from engine.scheduling.preemption import Preemption

PINNED_SHARE = 0.5
"""Part of the slots that items may have which pinned items may have."""


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
        for pool, cache in self.kv_pools:
            cache.pins.room = int(PINNED_SHARE * (pool.size - self.reserved(pool)))
        self.running: dict[int, Request] = {}
        """Admitted requests by arrival, in order of admission."""
        self.items_running = 0
        """Running requests of an :class:`ItemGroup`, which take no running place."""
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
        """Return ``count`` slots for ``branch`` (None: the prefix), or none at all.

        Pins give way to a request that runs alone, so that each request that fits the slots is computed at some time.
        """
        pool, cache = self.kv_pools[request.on_lenvm]
        while pool.available < count:
            if cache.evict(count - pool.available):
                continue
            if may_preempt and self._preempt_behind(request, branch):
                continue
            if len(self.running) > 1 or not cache.pins.give_way():
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

    def release(self, request: Request) -> None:
        """Free all slots, and the running place if it has one."""
        if isinstance(request, ItemBlock):
            self._free_block(request)
        else:
            for part in request.with_aux:
                self._free(part)
        if self.running.pop(request.arrival, None) is not None:
            self.items_running -= request.group is not None
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
