"""Starts waiting requests in a step, where there are running places, slots and tokens for them.

In a step of a catalogue, hundreds of items are cached, and each needs the few tokens of its query. Composed one by one they took
more time of the host than the step takes on a GPU, so :func:`compose_block` composes them at once. The result is that of
:class:`~engine.scheduling.composer.StepComposer`, which composes all other items: those that are not cached, and those whose query
does not fit the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from yardstick_llm.engine.ints import EMPTY, Ints
from yardstick_llm.engine.kvcache.eviction import Node
from yardstick_llm.engine.requests.batch import Batch, ExtendSegment
from yardstick_llm.engine.requests.core import ItemBlock, ItemGroup, Request
from yardstick_llm.engine.scheduling.allocation import Allocator
from yardstick_llm.engine.scheduling.composer import StepComposer
from yardstick_llm.engine.scheduling.fair_queue import FairQueue, Flow, WaitEstimator

Found = tuple[int, Node, list[Ints]]
"""A cached item: its place in the group, the node with which it ends, and the slots of the nodes on its path."""


def compose_block(batch: Batch, group: ItemGroup, room: int, allocator: Allocator) -> ItemBlock | None:
    """Add the queries of cached items of ``group`` to the step, as many as fit into ``room`` tokens. Return None, and change
    nothing, if there are none.

    Waiting items are looked up until as many are found as fit. Once all were looked up, only the first ones are looked up again, of
    which another request may have computed some: as many as would fit if all were cached.
    """
    if group.adapter is not None and not allocator.turns.takes(group):
        return None
    if group.item_images is not None and group.item_images.in_query:
        return None
    count = group.query.size
    found = _hold_cached(group, room // count, allocator)
    cache = allocator.kv_pool(group).cache
    while found and not allocator.has_room(group.on_lenvm, len(found) * count):
        cache.release(found.pop()[1], used=False)
        group.may_be_cached = True
    if not found:
        return None
    slots = allocator.allocate(len(found) * count, group, None, may_preempt=False)
    contexts = _contexts(found, list(slots.reshape(-1, count)))
    items = [group.cached(place, node, context) for (place, node, _), context in zip(found, contexts, strict=True)]
    block = ItemBlock(
        id=group.id,
        prefix=EMPTY,
        caller=group.caller,
        adapter=group.adapter,
        size=sum([item.size for item in items]),
        group=group,
        on_lenvm=group.on_lenvm,
        step=allocator.step,
        items=items,
        branches=[item.branches[0] for item in items],
        slots=slots,
    )
    segments = []
    for item, branch, context in zip(items, block.branches, contexts, strict=True):
        item.block = block
        segments.append(ExtendSegment(item, branch, branch.tokens.view, context))
    batch.extend(segments, slots.size, on_lenvm=group.on_lenvm)
    return block


def _hold_cached(group: ItemGroup, most: int, allocator: Allocator) -> list[Found]:
    """Hold the prefixes of up to ``most`` waiting items that are cached whole, within what is left to items."""
    cache, salt = allocator.kv_pool(group).cache, group.salt
    found: list[Found] = []
    left, held = allocator.left_to_items(group), cache.held_item_tokens
    for index in group.waiting if group.may_be_cached else group.waiting[:most]:
        if len(found) == most:
            break
        prefix = group.prefixes[index]
        cached = cache.find(salt, prefix) if prefix.size else None
        if cached is None:
            continue
        if prefix.size + (len(found) + 1) * group.query.size > left + held - cache.held_item_tokens:
            break
        cache.hold(cached[0])
        found.append((index, *cached))
    else:
        group.may_be_cached = False
    return found


def _contexts(found: list[Found], own: Sequence[Ints]) -> list[Ints]:
    """Return the slots of each item's path and, behind them, its ``own``."""
    parts = [[*slots, row] for (_, _, slots), row in zip(found, own, strict=True)]
    lengths = [sum([part.size for part in each]) for each in parts]
    slots = np.concatenate(list(chain.from_iterable(parts)))
    ends = list(accumulate(lengths))
    return [slots[end - length : end] for end, length in zip(ends, lengths, strict=True)]


DYNAMIC_THRESHOLD = 8
"""While several tenants share the engine, a tenant gets another place, or more slots for a waiting request, only if it has less
than this many times the number of free ones. Source: Choudhury and Hahne 1998, "Dynamic queue length thresholds for shared-memory
packet switches"; 8 leaves a ninth free beside one flood."""


class Admission:
    """Starts waiting requests of flows, and gives flows the rest of a step."""

    def __init__(
        self,
        max_running_requests: int,
        queue: FairQueue,
        allocator: Allocator,
        composer: StepComposer,
        wait_estimator: WaitEstimator,
    ) -> None:
        self._max_running_requests = max_running_requests
        self._queue = queue
        self._allocator = allocator
        self._composer = composer
        self._wait_estimator = wait_estimator
        self._max_load, self._now, self._contended = 0, 0.0, False
        self._closed_above = math.inf
        """For this step, tenants that hold at least this many slots for their weight admit nothing, because a tenant that
        holds no more found too few slots for its next request.
        """

    def begin(self, max_load: int, now: float, *, contended: bool) -> None:
        """Begin a step. ``max_load``: its most tokens (:attr:`Batch.load`). ``contended``: :meth:`FairQueue.contended`."""
        self._max_load, self._now, self._contended = max_load, now, contended
        self._closed_above = math.inf

    def admit_waiting(self, batch: Batch, flow: Flow, before: float = math.inf) -> None:
        """Start waiting requests of a tenant whose rank is lower than ``before`` while it has a share of the step, and while there
        are places and slots."""
        searched: Request | None = None
        while flow.waiting and flow.waiting[0][0] < before and flow.room > 0 and batch.load < self._max_load:
            if not self._has_room(flow):
                return
            waiting, room = flow.waiting[0][2], min(flow.room, self._max_load - batch.load)
            if isinstance(waiting, ItemGroup) and waiting is not searched:
                searched = waiting
                self._admit_cached(batch, flow, waiting, room)
            elif not self._allocator.leaves_reserve(waiting.first):
                return
            elif not self._admit(batch, flow, room):
                self._closed_above = min(self._closed_above, flow.holding)
                return

    def _has_room(self, flow: Flow) -> bool:
        """Whether the step takes the adapter of the next request of a tenant, and there is a running place for it, with which the
        tenant leaves enough places and slots to others."""
        waiting = flow.waiting[0][2]
        if not self._allocator.turns.takes(waiting):
            return False
        is_forecast = waiting.accepted is not waiting
        free = self._free_places
        if not self._contended or (free <= 0 and not is_forecast):
            return free > 0 or is_forecast
        available = [kv_pool.pool.available + kv_pool.cache.evictable for kv_pool in self._allocator.kv_pools]
        shares = zip((0 if is_forecast else len(flow.running), *flow.held), (free, *available), strict=True)
        return flow.holding < self._closed_above and all(own == 0 or own < DYNAMIC_THRESHOLD * left for own, left in shares)

    @property
    def _free_places(self) -> int:
        return self._max_running_requests - len(self._allocator.running) + self._allocator.without_place

    def use_rest(self, batch: Batch) -> None:
        """Give the rest of the step to flows that can use it, those furthest behind first."""
        if batch.load >= self._max_load:
            return
        for flow in self._queue.dealt:
            if not self._queue.satisfied:
                self._use_rest_of(batch, flow)
            flow.room = self._max_load - batch.load
            self.admit_waiting(batch, flow)
        for flow in self._queue.others():
            if batch.load >= self._max_load or self._free_places <= 0 or self._closed_above <= 0:
                return
            flow.room = self._max_load - batch.load
            self.admit_waiting(batch, flow)

    def _use_rest_of(self, batch: Batch, flow: Flow) -> None:
        """Compute more tokens of a tenant's running requests than its share. A request that is already in the step preempts
        nothing, because it might take slots of its own branches, and a guided request is not added twice."""
        for request in list(flow.running.values()):
            if batch.load >= self._max_load:
                return
            again = request.step == self._allocator.step
            if request.arrival in self._allocator.running and not (again and len(request.with_aux) > 1):
                self._composer.compute(batch, flow, request, self._max_load - batch.load, request.reserve, may_preempt=not again)

    def _admit(self, batch: Batch, flow: Flow, room: int) -> bool:
        """Start the first waiting request of a tenant if at least one of its tokens fits into ``room``."""
        request = self._start(flow)
        for part in request.with_aux:
            part.node = self._allocator.kv_pool(part).cache.acquire_root(part.salt)
        spent = self._composer.compute(batch, flow, request, room, request.reserve, may_preempt=False)
        if not spent:
            self._allocator.preempt(request)
            return False
        flow.room -= spent
        for part in request.with_aux:
            part.begun = True
        self._note_begun(request)
        return True

    def _admit_cached(self, batch: Batch, flow: Flow, group: ItemGroup, room: int) -> None:
        """Start the items of the first waiting group of a tenant that are cached and fit into ``room``."""
        block = compose_block(batch, group, room, self._allocator)
        if block is not None:
            self._start(flow, block)
            spent = block.slots.size
            self._allocator.count_taken(block, spent, block.branches[0])
            flow.spent += spent
            flow.room -= spent
            self._note_begun(block)

    def _start(self, flow: Flow, block: ItemBlock | None = None) -> Request:
        """Let the first waiting request of a tenant, or a ``block`` of it, run."""
        request = self._queue.start(flow, block)
        self._allocator.running[request.arrival] = request
        self._allocator.count_running(request, 1)
        return request

    def _note_begun(self, request: Request) -> None:
        accepted = request.group or request
        if accepted.first_computed is None:
            accepted.first_computed = self._now
        self._wait_estimator.begin(accepted, request.size)

    def admit_by_preemption(self, batch: Batch, flow: Flow) -> None:
        """Admit the next request of a tenant that has a share of the step but lacks a running place or slots.

        Requests of tenants that have more for their weight are preempted for it. It is admitted before the running ones are
        computed, because they would take these slots.
        """
        waiting = flow.waiting[0][2] if flow.waiting else None
        if waiting is None or not (self._allocator.turns.takes(waiting) and self._allocator.leaves_reserve(waiting.first)):
            return
        if self._free_places <= 0 and waiting.first.takes_place:
            victim = self._allocator.victim_for_place(flow)
            victims = [] if victim is None else [victim]
        else:
            request = flow.waiting[0][2].first
            found = [self._allocator.victims_for_slots(flow, part) for part in request.with_aux]
            victims = [] if None in found else list(dict.fromkeys(itertools.chain.from_iterable(filter(None, found))))
        for victim in victims:
            self._allocator.preempt(victim)
        if victims:
            self._admit(batch, flow, flow.room)
